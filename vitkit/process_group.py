"""The processes of one job: how they find each other, after restarts too, and how they end with their launcher.

join               connect the processes that torchrun or accelerate started, within a time limit
launch             what the processes of one torchrun job have in common, restarted ones included
end_with_launcher  leave no process behind when torchrun is killed
end_launcher       end torchrun where starting again would meet the same error
leave              end this process without taking torch apart first
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import platform
import signal
import sys
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from vitkit.errors import ConfigError, LostWorker

LIMIT = "VITKIT_JOIN_SECONDS"  # environment variable: how long processes wait for each other
SECONDS = 300  # its default; the machines of a cluster take minutes to import torch from a network drive
GRACE = 30.0  # seconds to save and end after the launcher was killed: as long as torchrun itself allows
TICK = 0.05  # seconds between two looks at who has come
ELASTIC = "TORCHELASTIC_RUN_ID"  # environment variable that torchrun sets, and accelerate launch through it
DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


def join(backend: str, rank: int, ranks: int) -> None:
    """Create torch's default process group.

    torchrun keeps one store for all restarts, and torch would read the addresses of processes that have ended from it.
    So the main process first answers every process in person, and the group then uses names of its own.

    Args:
        backend: `gloo` or `nccl`.
        rank: this process, counted from 0.
        ranks: number of processes.

    Raises:
        LostWorker: not all processes came within the time limit.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    seconds = _limit()
    deadline = time.monotonic() + seconds
    try:
        store = next(rendezvous("env://", rank, ranks, timeout=timedelta(seconds=seconds)))[0]
        group = _gather_everyone(store, ranks, deadline) if rank == 0 else _find_main(store, rank, deadline)
    except (TimeoutError, dist.DistError) as error:  # nobody listens, or who did has ended
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        missing = f" ({error})" if isinstance(error, TimeoutError) else ""
        raise LostWorker(
            f"Process {rank} of {ranks} expected to join the others at {where} within {seconds} s, but not all of them "
            f"came{missing}. Check that the command was started on every machine and that they can reach {where}; on "
            f"several machines, start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. {LIMIT} sets another limit."
        ) from error
    dist.init_process_group(backend, store=PrefixStore(group, store), rank=rank, world_size=ranks)


def _limit() -> int:
    text = os.environ.get(LIMIT, str(SECONDS))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{LIMIT} must be a whole number of seconds, at least 1; got {text!r}.")
    return int(text)


def _gather_everyone(store: Any, ranks: int, deadline: float) -> str:
    """Answer the other processes until all have confirmed; return the name of the group, which nobody used before."""
    group = f"vitkit/group/{uuid.uuid4().hex}"
    missing = set(range(1, ranks))
    while missing:
        for rank in sorted(missing):
            if store.check([f"{group}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"vitkit/caller/{rank}"]):
                # It may be the token of a process that has ended: then nobody confirms, and the next one overwrites it.
                store.set(f"vitkit/answer/{store.get(f'vitkit/caller/{rank}').decode()}", group)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"missing: {', '.join(map(str, sorted(missing)))}")
        time.sleep(TICK if missing else 0)
    return group


def _find_main(store: Any, rank: int, deadline: float) -> str:
    """Call the main process and confirm its answer; return the name of the group."""
    token = uuid.uuid4().hex
    store.set(f"vitkit/caller/{rank}", token)
    while not store.check([f"vitkit/answer/{token}"]):
        if time.monotonic() > deadline:
            raise TimeoutError("missing: 0")
        time.sleep(TICK)
    group = store.get(f"vitkit/answer/{token}").decode()
    store.set(f"{group}/{rank}", "")
    return group


def launch() -> str:
    """Return what names the torchrun job that started this process: the same after a restart; empty without torchrun.

    That is its --rdzv-id. Without one (torchrun then says "none") it is the agent process on this machine.
    """
    job = os.environ.get(ELASTIC, "")
    if job != "none":
        return job
    began = ""
    with suppress(OSError, ValueError, IndexError):  # tells the agent from an older process with its number
        began = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"process {os.getppid()} {began} on {platform.node()}"


def end_with_launcher() -> None:
    """Stop this process when torchrun is killed: it gets SIGTERM, on which a run saves, and later SIGKILL."""
    if ELASTIC not in os.environ or any(thread.name == ELASTIC for thread in threading.enumerate()):
        return
    parent, told = os.getppid(), False
    if sys.platform == "linux":
        told = ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM) == 0
    if os.getppid() != parent or _adopted(parent):  # it was killed while this process was starting
        raise LostWorker("torchrun, which started this process, has ended.")
    threading.Thread(target=_watch, args=(parent, told), name=ELASTIC, daemon=True).start()


def end_launcher() -> None:
    """Ask torchrun to end the job on this machine, if it would start this process again.

    torchrun restarts its processes whatever their exit code is; SIGTERM ends it with all of them.
    """
    tries = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if ELASTIC in os.environ and all(map(str.isdecimal, tries)) and int(tries[0]) < int(tries[1]):
        os.kill(os.getppid(), signal.SIGTERM)


def _adopted(parent: int) -> bool:
    """Whether the parent is the system's first process, which adopts orphans; in a container, torchrun may be it."""
    if parent != 1:
        return False
    try:
        return "python" not in os.readlink("/proc/1/exe")
    except OSError:  # another user's process, or not Linux
        return True


def _watch(parent: int, told: bool) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    if not told:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)  # a process that waits for others cannot act on SIGTERM
    os.kill(os.getpid(), signal.SIGKILL)


def leave(code: int) -> None:
    """End this process at once, as multiprocessing ends its own.

    Python would first take every module apart, which takes half a second if torch is one of them. This waits for
    threads, frees what nothing refers to any more, calls what is to be called at the end, and writes what was printed.
    If that cannot be written, it returns: the usual end reports such an error.

    Args:
        code: the exit code.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    gc.collect()  # closes files and databases of objects that refer to each other
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):  # a closed pipe, a full disk, a closed stream
        return
    os._exit(code)
