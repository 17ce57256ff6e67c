"""STUDIES: the paper's comparisons on a small scale, each a list of cells to train and a way to show them.

`picture` imports Matplotlib; nothing else here does, so that a study runs on a machine without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitkit.data.mix import Mix
from vitkit.data.sources import parse
from vitkit.errors import pick
from vitkit.jobs.cells import SIZES, Cell, product
from vitkit.training.recipe import Recipe
from vitkit.training.recipes import RECIPES

if TYPE_CHECKING:
    from vitkit.explanations import draw

# The recipe of a study, by the kind of its data: each has a small model of its own.
SMALL_RECIPES = {"digits": "digits", "idx": "fashion-adamw"}
OTHERWISE = "foodvision-scratch"
AXES = {"train": "training images", "flops": "training compute (FLOPs)", "lr": "learning rate"}
SHARES = (0.01, 0.03, 0.1, 0.3)  # of the training images


@dataclass(frozen=True, kw_only=True)
class Study:
    """One comparison.

    Args:
        source: where the paper has it.
        question: what it asks.
        cells: what is trained, without seeds.
        paper: the paper's own result of each cell, in order, where there is one.
        x: the horizontal axis of the plot: a field of the cells, or a result such as `flops`; None for a bar per cell.
        series: the field that makes the lines of the plot.
        epochs: passes over the training data; None if the cells say so themselves.
        shots: images per class for the few-shot accuracy; 0 leaves it out.
    """

    source: str
    question: str
    cells: Sequence[Cell]
    paper: Sequence[float] = ()
    x: str | None = None
    series: str | None = None
    epochs: float | None = 15
    shots: int = 5

    def with_seeds(self, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Return every cell with every seed."""
        return [{**cell, "seed": seed} for cell in self.cells for seed in seeds]


def _over(**fields: Sequence[Any]) -> list[Cell]:
    return [{name: value for name, value in cell.items() if name != "seed"} for cell in product(fields)]


STUDIES: dict[str, Study] = {
    "positions": Study(
        source="Table 8 (D.4)",
        question="Which position embeddings, and where?",
        cells=[
            {"positions": "none"},
            *_over(positions=("1d", "2d"), positions_in=("first", "every", "shared")),
            {"positions": "none", "relative": "offsets"},
            {"positions": "sincos"},  # arXiv 2205.01580: ours
        ],
        paper=(0.61382, 0.64206, 0.63964, 0.64292, 0.64001, 0.64046, 0.64022, 0.64032),
    ),
    "pooling": Study(
        source="Figure 9 (D.3)",
        question="Class token or mean pooling, and at which learning rate?",
        cells=_over(pool=("cls", "mean"), lr=(3e-4, 1e-3, 3e-3)),
        x="lr",
        series="pool",
    ),
    "data-size": Study(
        source="Figures 3 and 4",
        question="How does accuracy grow with the training images, for models of three sizes?",
        cells=[*_over(size=tuple(SIZES), images=SHARES), *_over(size=tuple(SIZES))],
        x="train",
        series="size",
        epochs=30,
    ),
    "compute": Study(
        source="Figure 5",
        question="How does accuracy grow with compute, for models of three sizes?",
        cells=_over(size=tuple(SIZES), epochs=(1, 3, 10, 30)),
        x="flops",
        series="size",
        epochs=None,
    ),
}


def recipe_of(data: str, name: str | None = None) -> Recipe:
    """Return the recipe of a study's runs: plain, so that the cells differ in nothing but what they are about.

    Args:
        data: the data set.
        name: a key of RECIPES (default: the one for small models on this kind of data).
    """
    row = pick(RECIPES, name or SMALL_RECIPES.get(parse(data)[0], OTHERWISE), "recipe")
    return dataclasses.replace(row, ema=None, mix=Mix(), drop_path=0.0)


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Average the results of the cells that differ only in their seeds.

    Args:
        rows: rows of results, see `cells.train_cell`.

    Returns:
        For each cell: `cell` (without the seed), `seeds`, and the mean and the sample standard deviation of `top1` and
        `few_shot`; other numbers of the first seed.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        cell = {field: value for field, value in row["cell"].items() if field != "seed"}
        groups.setdefault(repr(cell), []).append({**row, "cell": cell})
    found = []
    for group in groups.values():
        merged = {**group[0], "seeds": len(group)}
        for score in ("top1", "few_shot"):
            values = [row[score] for row in group if row.get(score) is not None]
            if values:
                mean = sum(values) / len(values)
                spread = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5 if len(values) > 1 else None
                merged |= {score: mean, f"{score}_std": spread}
        found.append(merged)
    return found


def label(cell: Cell) -> str:
    """Return a cell in words: `positions 2d, positions_in every`."""
    return ", ".join(
        f"{field} {value:g}" if isinstance(value, float) else f"{field} {value}" for field, value in cell.items()
    )


def table(rows: Sequence[Mapping[str, Any]], paper: Sequence[float] = ()) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the headings and the rows of a table of results; a heading that ends in # is of numbers.

    Args:
        rows: the result of `summary`.
        paper: the paper's own results, in order.
    """
    fields = list(dict.fromkeys(field for row in rows for field in row["cell"]))
    few = next((f"{row['shots']}-shot#" for row in rows if row.get("few_shot") is not None), None)
    heads = [*fields, "images#", "held-out accuracy#", *([few] if few else []), *(["paper#"] if paper else [])]
    lines = []
    for number, row in enumerate(rows):
        words = [_word(row["cell"].get(field)) for field in fields]
        scores = [_score(row, "top1"), *([_score(row, "few_shot")] if few else [])]
        known = [f"{paper[number]:.2%}" if number < len(paper) else ""] if paper else []
        lines.append((*words, f"{row['train']:,}", *scores, *known))
    return heads, lines


def _word(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _score(row: Mapping[str, Any], name: str) -> str:
    spread = row.get(f"{name}_std")
    return f"{row[name]:.2%}" + (f" ± {spread:.2%}" if spread is not None else "")


def picture(rows: Sequence[Mapping[str, Any]], title: str, x: str | None, series: str | None) -> draw.Figure:
    """Draw the results of a sweep: accuracy on held-out images, and few-shot accuracy if it was measured.

    Args:
        rows: the result of `summary`.
        title: a line above the plot.
        x: the horizontal axis: a field of the cells or a result, with numbers; None for a row per cell.
        series: the field that makes the lines; None for a single line.
    """
    from vitkit.explanations import draw

    shots = next((row["shots"] for row in rows if row.get("few_shot") is not None), None)
    scores = {"held-out accuracy": "top1"} | ({f"{shots}-shot accuracy": "few_shot"} if shots else {})
    if x is None:
        found = {words: ([r[s] for r in rows], [r.get(f"{s}_std") for r in rows]) for words, s in scores.items()}
        figures = [
            draw.dots([label(row["cell"]) for row in rows], {words: values}, title=title if not i else "", x=words)
            for i, (words, values) in enumerate(found.items())
        ]
        return figures[0] if len(figures) == 1 else draw.stacked(figures)
    drawn: list[draw.Figure] = []
    for words, score in scores.items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            at = row["cell"].get(x, row.get(x))
            lines.setdefault(_word(row["cell"].get(series)) if series else "", []).append((float(at), row[score]))
        points = {name: tuple(zip(*sorted(pairs), strict=True)) for name, pairs in lines.items()}
        above = title if not drawn else ""
        drawn.append(draw.lines(points, title=above, x=AXES.get(x, x), y=words, log_x=True))  # type: ignore[arg-type]
    return drawn[0] if len(drawn) == 1 else draw.stacked(drawn)
