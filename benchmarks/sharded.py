"""Train by DDP and with `--shard` on one GPU, and compare with one plain process.

    python -m benchmarks.sharded [--device cuda] [--steps 12]

A small ViT learns the digits: plainly; in a group of one process (NCCL; on the CPU gloo); and in a group of two
processes on the same GPU (gloo, because NCCL refuses two processes on one GPU; DDP only, because sharded CUDA tensors
crash torch's gloo: two processes shard on the CPU only). One sharded run is killed by SIGKILL
under torchrun, which starts it again; another is killed and resumed by one plain process. The biases of keys are not
compared: their true gradient is zero, and Adam divides its rounding errors by themselves. The exit code is 1 if a run
fails or a weight in fp32 differs by more than 1e-6 from that of the same number of processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitkit.errors import VitkitError

BATCH, SAVE_EVERY, KILLED_AT = 32, 4, 7
EQUAL = 1e-6  # largest difference of a weight in fp32; logits may differ ten times as much


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        name: of its folder.
        precision: fp32 or bf16.
        group: processes that form a group; 0 for one plain process.
        shard: whether the group shards the model.
        killed: whether the run kills itself once.
        like: the run to compare it with.
    """

    name: str
    precision: str = "fp32"
    group: int = 0
    shard: bool = False
    killed: bool = False
    like: str = "plain"


RUNS = tuple(
    Run(f"{name}-{precision}", precision, group, shard, killed, f"{like}-{precision}")
    for precision in ("fp32", "bf16")
    for name, group, shard, killed, like in (
        ("plain", 0, False, False, "plain"),
        ("ddp", 1, False, False, "plain"),
        ("shard", 1, True, False, "plain"),
        ("shard-killed", 1, True, True, "shard"),
        ("ddp-two", 2, False, False, "plain"),
        ("shard-two", 2, True, False, "ddp-two"),
        ("shard-two-killed", 2, True, True, "shard-two"),
    )
    if precision == "fp32" or not killed
)


def train(run: Run, out: Path, device: str, steps: int, resume: bool = False) -> None:
    """Train in this process, which the environment makes one of a group."""
    from vitkit import runtime
    from vitkit.jobs import train as job
    from vitkit.model.config import ViTConfig
    from vitkit.training import shard
    from vitkit.training.recipes import RECIPES

    if run.group == 1:
        job.runtime_for = lambda settings: _grouped(shard.Sharded if run.shard else runtime.Runtime, settings)
    if run.group == 2:
        runtime.BACKENDS["cuda"] = "gloo"
    shape = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
    config = ViTConfig(**shape, image_size=8, patch_size=2, num_channels=1, num_classes=10)  # type: ignore[arg-type]
    recipe = replace(
        RECIPES["digits"],
        config=config,
        lr=1e-3,
        steps=steps,
        epochs=None,
        warmup=0,
        batch_size=BATCH,
        clip=0.5,
        ema=0.9,
    )
    settings: dict[str, Any] = {"workers": 0, "save_every": SAVE_EVERY, "evaluate_every": steps, "trackers": ()}
    # Two micro-batches in every process of a group of one: CUDA graphs do not work there.
    settings |= {"device": device, "precision": run.precision, "micro_batch": BATCH // 2, "shard": run.shard}
    watch = _kill if run.killed and not state(out) else None
    job.train("digits", out, recipe=recipe, settings=settings, watch=watch, resume=resume)


def _kill(event: dict[str, Any]) -> None:
    if event["event"] == "step" and event["step"] >= KILLED_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def _grouped(kind: Any, settings: Any) -> Any:
    """Return a runtime whose one process forms a group, which vitkit itself does not do."""
    from vitkit import runtime

    found = kind(settings.device, settings.precision)
    found._accelerator = runtime._accelerator(found.device.type, 0, 1)
    found.device = found._accelerator.device
    return found


def state(out: Path) -> str:
    """Return the name of a run's newest state, or nothing."""
    return max((path.stem for path in out.glob("state/step-*.safetensors")), default="")


def difference(a: Path, b: Path) -> tuple[bool, float, float]:
    """Return whether the last weights of two runs are the same, and the largest differences of a weight and a logit."""
    import torch

    from vitkit.checkpoints import containers, load

    names = [folder / "last.safetensors" for folder in (a, b)]
    one, two = (containers.read(name)[0] for name in names)
    same = all(torch.equal(one[name], two[name]) for name in one)
    apart = {name: (value - two[name]).abs() for name, value in one.items()}
    for name, values in apart.items():
        if name.endswith("qkv.bias"):
            values.chunk(3)[1].zero_()
    x = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        y, z = (load(name).eval()(x) for name in names)
    return same, max(float(values.max()) for values in apart.values()), float((y - z).abs().max())


def fork(run: Run, out: Path, device: str, steps: int, resume: bool = False) -> list[int]:
    """Start the processes of a run as copies of this one, which has imported torch and not used a GPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = []
    for rank in range(max(run.group, 1)):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                log = os.open(out.with_name(f"{out.name}-{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                if run.group:
                    # Both processes are the first of their machine, as it were: each takes its first GPU.
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(run.group)}
                    os.environ |= {"LOCAL_WORLD_SIZE": "1"}
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                train(run, out, device, steps, resume)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        found.append(pid)
    return found


def wait(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def torchrun(out: Path, device: str, steps: int) -> subprocess.Popen[bytes]:
    """Start a sharded run that kills itself under torchrun, which starts it again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    command += ["--max-restarts", "1", "-m", "benchmarks.sharded", "--worker", str(out), "--device", device]
    with open(out.with_name(f"{out.name}-0.log"), "ab") as log:
        return subprocess.Popen([*command, "--steps", str(steps)], stdout=log, stderr=log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--steps", type=int, default=12, help="updates of each run (default: 12)")
    parser.add_argument("--precision", default="", help="only this one (default: fp32 and bf16)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    under = Run("torchrun-fp32", "fp32", 1, True, True, "shard-fp32")
    if args.worker:
        train(under, args.worker, args.device, args.steps)
        return
    import accelerate  # noqa: F401

    import vitkit.jobs.train  # noqa: F401  # imported once, for all copies

    here = [run for run in RUNS if not (args.device == "cuda" and run.shard and run.group == 2)]
    failed, runs = False, [run for run in here if args.precision in run.precision]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        how = (args.device, args.steps)
        codes = {run: wait(pids) for run, pids in [(run, fork(run, place / run.name, *how)) for run in runs]}
        launcher = torchrun(place / under.name, *how)
        notes = {run: f"ended with {codes[run]} at {state(place / run.name)}; " for run in runs if run.killed}
        again = [(run, replace(run, group=0, shard=False, killed=False)) for run in notes]
        codes |= {run: wait(fork(plain, place / run.name, *how, resume=True)) for run, plain in again}
        codes[under] = [launcher.wait()]
        for run in [*runs, under]:
            failed = report(run, codes[run], notes.get(run, ""), place) or failed
    sys.exit(1 if failed else 0)


def report(run: Run, codes: list[int], note: str, place: Path) -> bool:
    """Print how a run ended; return whether it failed."""
    if any(codes):
        logs = [path.read_text(encoding="utf-8", errors="replace") for path in place.glob(f"{run.name}-[0-9].log")]
        print(f"{run.name}: {note}FAILED {codes}\n" + "\n".join(text[-1500:] for text in logs), flush=True)
        return True
    try:
        same, weights, logits = difference(place / run.name, place / run.like)
    except VitkitError as error:
        print(f"{run.name}: {note}cannot be compared with {run.like}: {error}", flush=True)
        return True
    # Other sums of other micro-batches: only runs on the same number of processes must be equal.
    wrong = run.precision == "fp32" and (run.group == 1 or run.shard) and max(weights, logits / 10) > EQUAL
    differ = "the same weights" if same else f"weights within {weights:.1e}, logits within {logits:.1e}"
    print(f"{run.name}: {note}next to {run.like}: {differ}{' WRONG' if wrong else ''}", flush=True)
    return wrong


if __name__ == "__main__":
    main()
