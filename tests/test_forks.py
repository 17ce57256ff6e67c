"""A forked command is a process of its own, as a fresh one is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.forks import ENVIRONMENT, forking

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands are forked on Linux only")

SCRIPT = """
import json, os, random, sys
if sys.argv[1:] == ["killed"]:
    os.kill(os.getpid(), 9)
seen = ["colorsys" in sys.modules, sys.argv, os.getcwd(), sys.stdin.read(), os.environ.get("COLUMNS"), sys.path[0]]
print(json.dumps(seen))
print(random.random(), __name__, __file__, file=sys.stderr)
sys.exit(3)
"""
THREADED = """
import ctypes, threading, time
def work():
    time.sleep(0.2)  # as on a busy machine
    ctypes.CDLL(None).prctl(15, %r)  # PR_SET_NAME
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "seen.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def program(script: Path) -> Iterator[Path]:
    with forking(script, ["colorsys"]) as program:
        yield program


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        input="ä\n",
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_is_like_a_fresh_process(script: Path, program: Path, tmp_path: Path) -> None:
    fork = run(program, "a b", "\x1b", cwd=tmp_path, COLUMNS="77")
    fresh = run(sys.executable, script, "a b", "\x1b", cwd=tmp_path, COLUMNS="77")
    assert fork.returncode == fresh.returncode == 3
    forked, *seen = json.loads(fork.stdout)
    assert forked
    assert [False, *seen] == json.loads(fresh.stdout)
    assert seen[:4] == [[str(script), "a b", "\x1b"], str(tmp_path), "ä\n", "77"]
    assert fork.stderr.split()[1:] == fresh.stderr.split()[1:] == ["__main__", str(script)]


def test_each_draws_its_own_random_numbers(program: Path, tmp_path: Path) -> None:
    assert run(program, cwd=tmp_path).stderr != run(program, cwd=tmp_path).stderr


def test_what_a_fork_could_hide_runs_in_a_fresh_process(program: Path, tmp_path: Path) -> None:
    for done in (run(program, cwd=tmp_path, PYTHONUTF8="0"), run(program, "serve", cwd=tmp_path)):
        assert done.returncode == 3
        assert json.loads(done.stdout)[0] is False


def test_a_killed_command_looks_killed(program: Path, tmp_path: Path) -> None:
    assert run(program, "killed", cwd=tmp_path).returncode == -signal.SIGKILL
    assert run(program, cwd=tmp_path).returncode == 3  # the server goes on


def test_a_server_with_threads_or_with_our_modules_is_refused(script: Path, tmp_path: Path) -> None:
    (script.parent / "threaded.py").write_text(THREADED % b"other", encoding="utf-8")
    (script.parent / "ours.py").write_text("import vitkit", encoding="utf-8")
    for name in ("threaded", "ours"):
        with pytest.raises(AssertionError, match="did not start"), forking(script, [name]):
            pass


def test_a_thread_that_is_made_for_forks_may_name_itself_late(script: Path, tmp_path: Path) -> None:
    (script.parent / "late.py").write_text(THREADED % b"jemalloc_bg_thd", encoding="utf-8")
    with forking(script, ["late"]) as program:
        assert run(program, cwd=tmp_path).returncode == 3


def test_a_test_that_forks_does_so_in_a_fresh_process_after_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # starts sooner
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib\n"
        "def test_fork():\n"
        "    pathlib.Path('seen').write_text(str(os.getppid()))\n"
        "def test_fail():\n"
        "    assert 1 == 2\n",
        encoding="utf-8",
    )
    assert conftest.OTHERS  # this test is one

    def item(name: str) -> Any:
        config = SimpleNamespace(rootpath=tmp_path)
        return SimpleNamespace(module=SimpleNamespace(forked=None), nodeid=f"test_it.py::{name}", config=config)

    assert conftest.pytest_pyfunc_call(item("test_fork")) is True
    assert (tmp_path / "seen").read_text() == str(os.getpid())
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        conftest.pytest_pyfunc_call(item("test_fail"))
