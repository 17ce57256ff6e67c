"""The command `vitkit` in processes that fork from one that has imported the large libraries.

A short command spends most of its time importing torch, scikit-learn and matplotlib. Here one process imports them and
forks for every command, so that tests with many commands pay once. Each command is still a process of its own: it has
its arguments, folder, environment, input, output and exit code, and imports vitkit's modules itself.

What a fork could hide runs in a fresh process instead: a command whose environment differs from the server's (libraries
read it on import), a command in a terminal, and those that listen (LISTEN), which tests end with signals.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ENVIRONMENT = dict(os.environ)  # before the libraries that tests import add to it
LIBRARIES = (
    "torch",
    "torch._dynamo",  # torch's optimizers import it at their first step
    "torch.utils.tensorboard",
    "accelerate",
    "huggingface_hub",
    "jinja2",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "safetensors.torch",
    "sklearn.datasets",
    "sklearn.linear_model",
)
THREADS = {
    "jemalloc_bg_thd"
}  # in pyarrow, which scikit-learn imports; made for forks: without it, jemalloc purges inline
PATIENCE = 2.0  # seconds for a new thread to name itself, and for a thread that has finished to end
LISTEN = ("serve", "teach")
FREE = {
    "PATH",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "COLUMNS",
    "LINES",
    "PYTEST_CURRENT_TEST",
}  # no library reads these on import

# What stands in for the command. It asks the server; the answer is `fresh` or an exit status as `waitpid` gives it.
CLIENT = """#!{python} -ES
import json, os, signal, socket, sys
command = {command!r}
fresh = sys.argv[1:2] and sys.argv[1] in {listen!r}
if not fresh:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect({address!r})
        socket.send_fds(server, [b"."], [0, 1, 2])
        server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
        server.shutdown(socket.SHUT_WR)
        answer = server.makefile().read()
    fresh = answer == "fresh"
if fresh:
    os.execv(command[0], [*command, *sys.argv[1:]])
if not answer:
    sys.exit("the process that forks commands is gone")
if os.WIFSIGNALED(int(answer)):
    if os.WTERMSIG(int(answer)) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(int(answer)), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(int(answer)))
sys.exit(os.waitstatus_to_exitcode(int(answer)))
"""


@contextlib.contextmanager
def forking(script: Path, libraries: Sequence[str] = LIBRARIES) -> Iterator[Path]:
    """Yield the path of a program that stands in for `script`, a Python program, while the context lasts."""
    folder = Path(tempfile.mkdtemp(prefix="forks-"))  # short: the address of a socket has at most 107 characters
    address = str(folder / "socket")
    program = folder / script.name
    program.write_text(
        CLIENT.format(python=sys.executable, command=[sys.executable, str(script)], listen=LISTEN, address=address),
        encoding="utf-8",
    )
    program.chmod(0o755)
    command = [sys.executable, str(Path(__file__)), address, str(script), *libraries]
    server = subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the process that forks commands did not start"
        yield program
    finally:
        server.communicate()  # closes its input, which ends it
        shutil.rmtree(folder)


def other_threads() -> list[str]:
    """Return the names of this process's threads, without the main one and those that are made for forks."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names += [(task / "comm").read_text().strip()] * (int(task.name) != os.getpid())
    return [name for name in names if name not in THREADS]


def serve(address: str, script: str, libraries: Sequence[str]) -> None:
    """Import the libraries; then fork for every request, and return in the fork, ready to run the script."""
    given = dict(os.environ)  # some libraries add to it
    sys.path[0] = str(Path(script).parent)  # as if the script had been started
    for name in libraries:
        importlib.import_module(name)
    assert "vitkit" not in sys.modules
    until = time.monotonic() + PATIENCE
    while (threads := other_threads()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads, f"threads do not survive a fork: {threads}"
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while True:
            if sys.stdin in select.select([listening, sys.stdin], [], [])[0]:
                sys.exit()  # the tests are over, in whatever way
            connection, _ = listening.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not os.fork():
                break
            connection.close()
    # One process waits for the command and tells the client its status; the other becomes the command.
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    arguments, folder, environment = json.loads(connection.makefile().read())
    differs = {name for name in environment.keys() | given if environment.get(name) != given.get(name)}
    if differs - FREE or any(map(os.isatty, descriptors)):
        connection.sendall(b"fresh")
        os._exit(0)
    command = os.fork()
    if command:
        connection.sendall(str(os.waitpid(command, 0)[1]).encode())
        os._exit(0)
    connection.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # again: the first ones know other files
        old = getattr(sys, name)
        new = open(number, old.mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        new.reconfigure(line_buffering=old.line_buffering, write_through=old.write_through)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    os.chdir(folder)
    for name in differs:
        os.environ.pop(name, None)
        os.environ.update({name: environment[name]} if name in environment else {})
    sys.argv = [script, *arguments]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3:])
    runpy.run_path(sys.argv[0], run_name="__main__")
