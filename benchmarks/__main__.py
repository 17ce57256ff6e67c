"""What `vitkit bench` measures, on a machine that may lack the packages of the command line.

    python -m benchmarks                                            # everything, ViT-B/16 on the CPU
    python -m benchmarks inference --device cuda --engine cuda-fused fp8
    python -m benchmarks training --device cuda --model vit-l/16 --batch-size 128 --peer timm

The other programs of this folder run as `python -m benchmarks.NAME`; each says what it needs with --help.
  speed     check (engines, gradients and kernels against fp32, on a CUDA device), memory, calls, features, fed, serve
  accuracy  records, foodvision, scratch, paper, photos, tasks, teach, explain, rollouts, explore, proof
  damage    kills, disk, elastic, sharded, ray_chaos, scale, fuzz, fuzz_serve
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from benchmarks import timing as _timing  # noqa: F401  # isort: skip  (sets OMP_WAIT_POLICY before torch is imported)

from vitkit.errors import VitkitError
from vitkit.jobs.bench import MEASURES, Options, append, bench, check_log


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", help=f"{', '.join(MEASURES)} (default: all of them)")
    parser.add_argument("--model", default="vit-b/16", help="a variant (default: vit-b/16)")
    parser.add_argument("--device", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", help="float32 or bfloat16 (default: float32; on CUDA bfloat16)")
    parser.add_argument("--batch-size", type=int, nargs="+", help="images per batch")
    parser.add_argument("--engine", nargs="+", help="our engines (default: all that fit the device)")
    parser.add_argument("--peer", nargs="*", help="other libraries (default: all; no name for none)")
    parser.add_argument("--merge", type=int, nargs="+", help="tokens to merge per block, with int8 on the CPU")
    parser.add_argument(
        "--compiled", action=argparse.BooleanOptionalAction, help="torch.compile too (default: on CUDA)"
    )
    parser.add_argument("--dropout", type=float, help="dropout rate in training (default: 0)")
    parser.add_argument("--drop-path", type=float, help="rate of stochastic depth in training (default: 0)")
    parser.add_argument("--data", type=Path, help="a folder of photos (default: sample photos)")
    parser.add_argument("--rounds", type=int, default=7, help="turns per contender (default: 7)")
    parser.add_argument("--log", type=Path, help="an existing Markdown file to append the tables to")
    given = vars(parser.parse_args())
    what, log = given.pop("what") or list(MEASURES), given.pop("log")
    warnings.simplefilter("ignore")  # the other libraries' own
    try:
        if log is not None:
            check_log(log)
        for table in bench(what, Options(**given)):
            print(table.markdown(), end="\n\n", flush=True)
            if log is not None:
                append(log, [table])
    except VitkitError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
