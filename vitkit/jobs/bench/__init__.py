"""How fast things are here, ours and the peers' beside each other: one file for each row of MEASURES.

    options.py    what is measured, refused where it makes no sense
    turns.py      contenders take turns; the machines are noisy, so nothing else is compared
    table.py      what comes out, as Markdown and in the log

What does not belong here: how a peer's model is built (jobs/peers.py), and what only a developer asks (benchmarks/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
        run: gives its tables, one after another.
        takes: the options that mean something to it, of those that not all take.
        words: what it is, for help.
    """

    run: Callable[[Options], Iterator[Benchmark]]
    takes: tuple[str, ...]
    words: str


MEASURES: dict[str, Measure] = {
    "inference": Measure(
        inference.measure,
        ("batch_size", "device", "dtype", "engine", "peer", "merge", "compiled"),
        "a batch of images to logits; one image is latency",
    ),
    "training": Measure(
        training.measure, ("batch_size", "device", "dtype", "peer", "compiled"), "a training step with its optimiser"
    ),
    "loading": Measure(loading.measure, ("peer",), "a checkpoint file to a model"),
    "data": Measure(data.measure, ("peer", "data"), "image files to normalised batches, on one core"),
}


def bench(what: Sequence[str], options: Options) -> Iterator[Benchmark]:
    """Measure, one table after another; mistakes are told before the first.

    Args:
        what: rows of MEASURES.
        options: of what, how, and beside whom.
    """
    rows = [pick(MEASURES, name, "measurement") for name in dict.fromkeys(what)]
    for name in options.given():
        if not any(name in row.takes for row in rows):
            takers = [key for key, row in MEASURES.items() if name in row.takes]
            raise ConfigError(
                f"{name} is for {' and '.join(takers)}; it means nothing to {' and '.join(what)}, so leave it out."
            )

    check_type(options.place.type, options.type)

    def tables() -> Iterator[Benchmark]:
        for row in rows:
            yield from row.run(options)

    return tables()
