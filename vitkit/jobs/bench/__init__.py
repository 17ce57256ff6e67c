"""How fast vitkit is here, next to other libraries and to its matrix products alone. One file per measurement.

    options.py    what to measure; refuses combinations that make no sense
    turns.py      contenders take turns, because a machine's speed changes from minute to minute
    table.py      the result, as Markdown and in a log

There are two entrances: `vitkit bench`, and `python -m benchmarks` for a machine that has torch and the other
libraries but not the packages that the command line needs.

What does not belong here: how another library's model is built (jobs/peers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vitkit.cpu_features import check_type
from vitkit.errors import ConfigError, pick
from vitkit.jobs.bench import data, inference, loading, training
from vitkit.jobs.bench.options import Options
from vitkit.jobs.bench.table import Benchmark, Row, append, check_log

__all__ = ["MEASURES", "Benchmark", "Measure", "Options", "Row", "append", "bench", "check_log"]


@dataclass(frozen=True)
class Measure:
    """One thing that can be measured.

    Args:
        run: yields its tables.
        takes: the options that apply to it, out of those that do not apply to every measurement.
        words: what it measures, for help texts.
    """

    run: Callable[[Options], Iterator[Benchmark]]
    takes: tuple[str, ...]
    words: str


MEASURES: dict[str, Measure] = {
    "inference": Measure(
        inference.measure,
        ("batch_size", "device", "dtype", "engine", "peer", "merge", "compiled"),
        "a batch of images to logits; a batch of one is latency",
    ),
    "training": Measure(
        training.measure,
        ("batch_size", "device", "dtype", "peer", "compiled", "dropout", "drop_path"),
        "a training step with its optimizer",
    ),
    "loading": Measure(loading.measure, ("peer",), "a checkpoint file to a model"),
    "data": Measure(data.measure, ("peer", "data"), "image files to normalized batches, on one core"),
}


def bench(what: Sequence[str], options: Options) -> Iterator[Benchmark]:
    """Measure, and yield one table after another. Mistakes in the options are raised before anything is measured.

    Args:
        what: rows of MEASURES.
        options: the model, the device, the contenders and the number of rounds.

    Raises:
        ConfigError: an option applies to none of these measurements.
    """
    rows = [pick(MEASURES, name, "measurement") for name in dict.fromkeys(what)]
    for name in options.given():
        if not any(name in row.takes for row in rows):
            takers = [key for key, row in MEASURES.items() if name in row.takes]
            raise ConfigError(
                f"{name} applies to {' and '.join(takers)}, not to {' and '.join(what)}; leave it out or measure "
                f"{takers[0]}."
            )
    check_type(options.torch_device.type, options.torch_dtype)
    if options.torch_device.index is not None and options.torch_device.type == "cuda":
        torch.cuda.set_device(options.torch_device)  # which all contenders run on and are waited for

    def tables() -> Iterator[Benchmark]:
        for row in rows:
            yield from row.run(options)

    return tables()
