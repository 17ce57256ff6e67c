"""Kill ranks and agents of torchrun at random, change the number of processes, and compare with an undisturbed run.

    python -m benchmarks.elastic [--steps 60] [--kills 4] [--seed 0] [--folder FOLDER]

A small ViT learns the digits on 4 processes of the CPU. Every process records which images it trained on at which step.

constant   one agent with 4 processes; ranks are killed, the first one among them, and every third time the agent, which
           is then started again. The weights and moments must be those of an undisturbed run, to the bit.
elastic    4 agents with one process each: an agent is killed, a rank, another agent; then two agents join, and a rank
           is killed: 4 -> 3 -> 2 -> 4 processes. The weights must agree up to rounding, except the biases of keys,
           whose true gradient is zero: Adam divides its rounding errors by themselves.

In both, every record must be the process's share of that step's global batch, every step must have been trained on by
all processes of some group, and no process may be left. The exit code is 1 if anything differs. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH = 32
ROUNDING = 1e-5  # largest difference of a weight between runs on different numbers of processes
PATIENCE = 900.0  # seconds that a restarted group may take; the cores are few, and others may use them
# An agent that is silent for 10 s counts as lost: on few cores, a healthy one may be slow.
RENDEZVOUS = "is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10"
SLOW = 4.0  # seconds until processes that wait for a stopped one may train another step, ...
TIMES = 2  # ... so many times
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_LOG_LEVEL": "ERROR"}


def work(out: Path, steps: int, records: Path) -> None:
    """Train as one process of torchrun; write down every share of a batch before it is computed.

    A step begins once the gate is open for it, so that a slow machine does not finish before its processes are killed.
    A process that was asked to stop passes the gate, because it stops after the step.
    """
    from dataclasses import replace

    from vitkit.jobs.train import train
    from vitkit.training.gradients import Gradients
    from vitkit.training.recipes import RECIPES

    group, plain, asked = "", Gradients.__call__, None

    def recorded(self: Gradients, step: int, batch: Any) -> Any:
        nonlocal group, asked
        group = group or self.runtime.gather(uuid.uuid4().hex)[0]
        asked = asked or signal.getsignal(signal.SIGTERM)  # the loop's handler, which it removes at the first signal
        rank, ranks = self.runtime.rank, self.runtime.ranks
        row = {"group": group, "step": step, "rank": rank, "ranks": ranks, "index": batch.index.tolist()}
        with open(records / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        while int((records / "gate").read_text(encoding="utf-8")) < step and signal.getsignal(signal.SIGTERM) is asked:
            time.sleep(0.02)
        return plain(self, step, batch)

    Gradients.__call__ = recorded  # type: ignore[method-assign]
    recipe = replace(RECIPES["digits"], steps=steps, epochs=None, warmup=5, batch_size=BATCH)
    settings = {"workers": 0, "save_every": 5, "evaluate_every": 20, "trackers": (), "device": "cpu"}
    _, outcome = train("digits", out, recipe=recipe, settings=settings)
    sys.exit(128 + outcome.signal if outcome.stopped else 0)


class Job:
    """A run under torchrun, whose ranks and agents can be killed.

    Args:
        name: of the run folder.
        place: where it goes.
        steps: updates.
        each: processes per agent.
        agents: their range, as --nnodes takes it.
        draw: decides what is killed, and when.
    """

    def __init__(self, name: str, place: Path, steps: int, each: int, agents: str, draw: random.Random) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.store = TCPStore("127.0.0.1", 0, is_master=True)  # outlives every agent
        self.out, self.records, self.log = place / name, place / f"{name}-records", place / f"{name}.log"
        self.records.mkdir(parents=True)
        self.steps, self.draw = steps, draw
        self.open(0)
        task = ["benchmarks.elastic", "--worker", str(self.out), "--steps", str(steps)]
        self.command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            agents,
            "--nproc_per_node",
            str(each),
        ]
        self.command += ["--max-restarts", "100", "--rdzv_backend", "c10d", "--rdzv_conf", RENDEZVOUS]
        self.command += ["--rdzv_endpoint", f"127.0.0.1:{self.store.port}", "--rdzv_id", f"{name}-{uuid.uuid4().hex}"]
        self.command += ["--local_addr", "127.0.0.1", "-m", *task, "--records", str(self.records)]
        self.agents: list[subprocess.Popen[bytes]] = []

    def open(self, step: int) -> None:
        """Let the processes train up to a step."""
        self.gate = min(step, self.steps)
        part = self.records / "gate.part"
        part.write_text(str(self.gate), encoding="utf-8")
        part.replace(self.records / "gate")

    def start(self, agents: int) -> None:
        """Start agents."""
        for _ in range(agents):
            with open(self.log, "ab") as log:
                env = {**os.environ, **QUIET}
                self.agents.append(subprocess.Popen(self.command, stdout=log, stderr=log, env=env))

    def rows(self) -> list[dict[str, Any]]:
        """Return everything that was recorded."""
        found = []
        for path in self.records.glob("*.jsonl"):
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # a line without its end was cut by a kill
            found += [{**json.loads(line), "pid": int(path.stem)} for line in lines]
        return found

    def wait(self, what: str, ready: Callable[[], bool]) -> None:
        """Wait until something is so."""
        until = time.monotonic() + PATIENCE
        while not ready():
            if time.monotonic() > until or (self.agents and all(a.poll() not in (None, 0) for a in self.agents)):
                self.end()
                text = self.log.read_text(encoding="utf-8", errors="replace")
                sys.exit(f"FAILED: {self.out.name}: waited in vain for {what}\n{text[-4000:]}")
            time.sleep(0.1)

    def trained(self, ranks: int, steps: int, known: set[str]) -> None:
        """Wait until a new group of so many processes has trained for so many steps, then let it run on a little."""
        slow, times = time.monotonic(), 0

        def ready() -> bool:
            nonlocal slow, times
            found = {row["step"] for row in self.rows() if row["ranks"] == ranks and row["group"] not in known}
            if found:
                self.open(max(found) + 1)
            elif time.monotonic() > slow + SLOW and times < TIMES:  # one that was asked to stop needs the others for it
                slow, times = time.monotonic(), times + 1
                self.open(self.gate + 1)
            return len(found) > steps

        self.wait(f"{steps} steps of {ranks} new processes", ready)
        self.open(self.gate + 2)
        time.sleep(self.draw.uniform(0, 0.3))

    def groups(self) -> set[str]:
        """Return the groups so far."""
        return {row["group"] for row in self.rows()}

    def kill_rank(self, first: bool) -> None:
        """Kill one process of the newest group: the first, or another one."""
        rows = self.rows()
        newest = max(rows, key=lambda row: Path(self.records / f"{row['pid']}.jsonl").stat().st_mtime)["group"]
        ranks = {row["rank"]: row["pid"] for row in rows if row["group"] == newest}
        os.kill(ranks[0 if first else self.draw.choice([r for r in ranks if r] or [0])], signal.SIGKILL)

    def kill_agent(self) -> None:
        """Kill one agent."""
        agent = self.agents.pop(self.draw.randrange(len(self.agents)))
        agent.kill()
        agent.wait()

    def left(self) -> list[int]:
        """Return the processes of the run that are still alive."""
        return [int(path.stem) for path in self.records.glob("*.jsonl") if Path(f"/proc/{path.stem}").exists()]

    def finish(self) -> None:
        """Wait for the end of the run."""
        self.open(self.steps)
        self.wait("the end", lambda: all(agent.poll() is not None for agent in self.agents))
        self.wait("the end of every process", lambda: not self.left())

    def end(self) -> None:
        """Kill everything."""
        for pid in [agent.pid for agent in self.agents if agent.poll() is None] + self.left():
            os.kill(pid, signal.SIGKILL)


def check(job: Job, steps: int) -> list[str]:
    """Return what is wrong with the recorded batches; an empty list if nothing is."""
    from vitkit.data import Order, share

    order, wrong = Order(1618, BATCH), []
    whole: dict[tuple[str, int], set[int]] = {}
    for row in job.rows():
        step, rank, ranks = row["step"], row["rank"], row["ranks"]
        if row["index"] != [index for _, index in order.rows(step)][share(BATCH, rank, ranks)]:
            wrong.append(f"process {rank} of {ranks} trained on other images at step {step}")
        members = whole.setdefault((row["group"], step), set())
        members.add(rank)
        if len(members) == ranks:
            whole[row["group"], step] = {-1}
    done = {step for (_, step), members in whole.items() if members == {-1}}
    return wrong + [f"no group trained on all of step {step}" for step in range(steps) if step not in done]


def difference(a: Path, b: Path) -> tuple[bool, float]:
    """Return whether two runs have the same weights and moments, and the largest difference of a weight.

    The biases of keys do not count in the latter: they add the same to all scores of a query, which changes nothing.
    """
    from vitkit.checkpoints import containers
    from vitkit.training.run_folder import RunFolder

    states = [RunFolder.open(run).latest() for run in (a, b)]
    one, two = (containers.read(state)[0] for state in states if state is not None)
    same = one.keys() == two.keys() and all(bool((one[name] == two[name]).all()) for name in one)
    x, y = (containers.read(run / "last.safetensors")[0] for run in (a, b))
    apart = {name: (x[name] - y[name]).abs() for name in x}
    for name, values in apart.items():
        if name.endswith("qkv.bias"):
            values.chunk(3)[1].zero_()
    return same, max(float(values.max()) for values in apart.values())


def constant(job: Job, kills: int) -> str:
    """Kill ranks and agents of a run with 4 processes."""
    job.start(1)
    known: set[str] = set()
    for number in range(kills):
        job.trained(4, job.draw.randint(2, 7), known)
        known = job.groups()
        if number % 3 == 2:
            job.kill_agent()
            job.open(job.gate + 1)
            job.wait("the end of its processes", lambda: not job.left())
            job.start(1)
        else:
            job.kill_rank(first=number % 3 == 1)
    job.finish()
    return f"{kills} kills"


def elastic(job: Job) -> str:
    """Shrink a run from 4 processes to 3 and to 2, and let it grow to 4."""
    job.start(4)
    known: set[str] = set()
    for ranks, event in ((4, "agent"), (3, "rank"), (3, "agent"), (2, "join"), (4, "rank"), (4, "")):
        job.trained(ranks, job.draw.randint(2, 4), known)
        known = job.groups()
        if event == "agent":
            job.kill_agent()
        elif event == "rank":
            job.kill_rank(first=job.draw.random() < 0.5)
        elif event == "join":
            job.start(2)
    job.finish()
    return "4 -> 3 -> 2 -> 4 processes, 2 agents and 2 ranks killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="updates of each run (default: 60)")
    parser.add_argument("--kills", type=int, default=4, help="kills of the constant run; 0 leaves it out (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="decides what is killed, and when (default: 0)")
    parser.add_argument("--folder", type=Path, help="an empty folder that is kept (default: a temporary one)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--records", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.steps, args.records)
    draw, failed = random.Random(args.seed), False
    with tempfile.TemporaryDirectory() as temporary:
        place = args.folder or Path(temporary)
        whole = Job("whole", place, args.steps, 4, "1", draw)
        whole.start(1)
        whole.finish()
        jobs: list[tuple[Job, Callable[[Job], str], bool]] = []
        if args.kills:
            job = Job("constant", place, args.steps, 4, "1", draw)
            jobs.append((job, lambda job: constant(job, args.kills), True))
        jobs.append((Job("elastic", place, args.steps, 1, "2:4", draw), elastic, False))
        for job, disturb, exact in jobs:
            began = time.monotonic()
            done = disturb(job)
            wrong = check(job, args.steps)
            batches = "WRONG" if wrong else "as ordered"
            same, largest = difference(whole.out, job.out)
            again = len({(row["group"], row["step"]) for row in job.rows()}) - args.steps
            wrong += (
                [] if (same if exact else largest < ROUNDING) else ["the weights differ from the undisturbed run's"]
            )
            failed = failed or bool(wrong)
            print(
                f"{job.out.name}: {done}; {len(job.groups())} groups, {again} of {args.steps} steps done again, "
                f"{time.monotonic() - began:.0f} s; global batches {batches}; "
                f"{'bit-identical' if same else f'largest difference of a weight {largest:.1e}'}; no process left",
                flush=True,
            )
            for sentence in wrong[:5]:
                print(f"WRONG: {sentence}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
