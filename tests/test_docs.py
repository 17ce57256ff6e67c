"""Every code block of the README and of docs/ runs, in the order of its page, in an empty folder.

A block that cannot run here follows a line `<!-- no-run: reason -->`; the list of those blocks is frozen below. The
real command line parses every `vitkit` command that a block shows, whether the block runs or not.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement

import tests.peers  # noqa: F401  makes timm importable next to a CPU-only torch
import vitkit
from tests.forks import ENVIRONMENT
from vitkit.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = [*PAGES, *sorted((ROOT / "examples").rglob("*.md"))]  # examples need downloads: their commands are only parsed
BLOCK = re.compile(r"(?:^<!-- no-run: (?P<reason>.+?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
SILENT = {"", "text", "json", "toml"}  # shown, not run

FRESH = {"start.md"}  # whose commands start as a user starts them; those of other pages are forks: see tests/forks.py

# page -> first line of each block that does not run
NO_RUN: dict[str, list[str]] = {
    "README.md": ["make demo"],
    "CONTRIBUTING.md": ["make check", "make book"],
    "start.md": ["make demo"],
    "howto/many-machines.md": [
        "from ray.train import FailureConfig, RunConfig, ScalingConfig"
    ],  # test_ray_train.py does
    "speed.md": ["vitkit export small.safetensors --to onnx --out small.onnx", "import json"],  # tests/speed runs both
}


PORT = "8421"  # of every server that a page starts


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    reason: str | None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def name_of(page: Path) -> str:
    """The page's path, from docs/ on."""
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(name_of(page), text.count("\n", 0, match.start()) + 1, match["language"], match["code"], match["reason"])
        for match in BLOCK.finditer(text)
    ]


def test_what_does_not_run_is_frozen() -> None:
    found = {
        name_of(page): [block.code.splitlines()[0].split("#")[0].strip() for block in blocks(page) if block.reason]
        for page in PAGES
    }
    assert {name: lines for name, lines in found.items() if lines} == NO_RUN


def _peers_are_here(code: str) -> bool:
    """Whether the other libraries that a block imports are installed; tests.peers has made them importable."""
    return all(
        importlib.util.find_spec(name) for name in re.findall(r"^import (timm|transformers|torchvision)$", code, re.M)
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    if name_of(page) not in FRESH and "```bash\n" in page.read_text(encoding="utf-8"):
        folders.insert(0, str(request.getfixturevalue("command").parent))
    environment = ENVIRONMENT | {"PATH": os.pathsep.join(folders)}
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        where = f"{block.page}, line {block.line}"
        if block.reason or block.language in SILENT or not _peers_are_here(block.code):
            continue
        if block.language == "python":
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                exec(compile(block.code, where, "exec"), names)
        elif block.language == "bash":
            code = block.code.replace(PORT, str(free_port()))  # something else may listen on a port that a page names
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", code],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"
        else:
            pytest.fail(f"{where}: blocks are python, bash, or one of {sorted(SILENT)}; got {block.language!r}")


def commands(code: str) -> list[list[str]]:
    """The arguments of every line `vitkit ...` in a block, up to a pipe, a redirection or a comment."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=True)
        words.whitespace_split = True
        if line.strip().removeprefix("$ ").startswith("vitkit "):
            found.append(list(itertools.takewhile(lambda word: not set(word) <= set("|&<>;()"), words))[1:])
    return found


def test_commands_are_found_in_any_line() -> None:
    code = (
        "$ vitkit predict runs/mine 'a b.jpg' \\\n  --top 3 | head -1  # the best\n vitkit models > list\nvitkit: no\n"
    )
    assert commands(code) == [["predict", "runs/mine", "a b.jpg", "--top", "3"], ["models"]]


SHOWN_COMMANDS = [
    pytest.param(words, id=f"{block.page}:{block.line}: {' '.join(words)}")
    for page in SHOWN
    for block in blocks(page)
    for words in commands(block.code)
]


@pytest.mark.parametrize("words", SHOWN_COMMANDS)
def test_the_command_line_accepts_what_pages_show(words: list[str]) -> None:
    name, *rest = words
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    command.make_context(name, rest).close()  # parses; runs nothing


def test_a_command_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Exception, match="No such option: --from"):
        test_the_command_line_accepts_what_pages_show(["predict", "a.jpg", "--from", "runs/mine"])


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}, which is not there"


def test_the_citation_is_valid_and_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format requires
    assert citation["version"] == vitkit.__version__


def test_ci_runs_the_python_versions_that_the_package_names() -> None:
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [name.split()[-1] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert ci["jobs"]["test"]["strategy"]["matrix"]["python"] == named


def test_the_pinned_versions_fit_the_installed_torch() -> None:
    """If they do not, pip installs nothing. Triton is named by torch's build for CUDA, not by that for CPUs."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    wanted = [Requirement(line) for line in metadata.requires("torch") or []]
    wanted = [
        each for each in wanted if each.name in pins and (each.marker is None or each.marker.evaluate({"extra": ""}))
    ]
    assert wanted
    for each in wanted:
        assert each.specifier.contains(pins[each.name]), f"torch requires {each}; constraints.txt has {pins[each.name]}"


def test_the_tables_that_contributors_extend_exist() -> None:
    rows = re.findall(r"`([\w/]+\.py): ([A-Z_, ]+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(rows) >= 11
    for file, names in rows:
        path = ROOT / file if file.startswith("tests/") else ROOT / "vitkit" / file
        text = path.read_text(encoding="utf-8")
        for name in names.split(", "):
            assert re.search(rf"^{name}\b.*=", text, re.M), f"CONTRIBUTING.md: {file} has no {name}"


def test_no_number_of_variants_in_prose() -> None:
    """Readers get the table of variants from `vitkit models`, not from a copy that goes stale."""
    assert "86,567,656" not in (ROOT / "README.md").read_text(encoding="utf-8")
