"""The learning rate, chosen as for Table 4: a run for each on a held-out part of train, then one on everything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.errors import ConfigError, OutputError, pick
from vitkit.jobs.train import train
from vitkit.training.loop import Outcome, Watch
from vitkit.training.recipes import RECIPES
from vitkit.training.run_folder import RunFolder


def sweep(
    data: str | Path,
    out: str | Path,
    *,
    recipe: str,
    lrs: Sequence[float] | None = None,
    changes: Mapping[str, Any] | None = None,
    final: bool = True,
    resume: bool = False,
    watch: Watch | None = None,
    say: Callable[[str], None] = print,
    **how: Any,
) -> dict[str, Any]:
    """Train with each learning rate, choose the best on the held-out part, train on everything with it.

    Args:
        data: what `vitkit.data.open_splits` takes.
        out: folder of the runs: `lr-0.01`, ..., `final`, and sweep.json.
        recipe: a row of RECIPES.
        lrs: what is tried; the recipe's lr_choices when not given.
        changes: fields of Recipe that the user sets; `val` is the held-out share.
        final: whether the last run, on everything, is made.
        resume: whether to go on with what is there.
        watch: is told what happens in each run.
        say: is told what is done next.
        how: everything else that `prepare` takes.

    Returns:
        What sweep.json holds: {"lrs": {lr: accuracy on the held-out part}, "lr": the best, "final": its folder}.

    Raises:
        ConfigError: nothing to choose from, or nothing held out.
        OutputError: there is something at `out` already.
    """
    row, out = pick(RECIPES, recipe, "recipe"), Path(out).expanduser()
    changes = {name: value for name, value in (changes or {}).items() if value is not None}
    tried = sorted(set(lrs or row.lr_choices))
    if not tried:
        raise ConfigError(
            f"The recipe {recipe!r} has no learning rates to choose from; give some, such as --lrs 0.001,0.01."
        )
    if changes.pop("lr", None) is not None:
        raise ConfigError("A sweep chooses the learning rate itself; give --lrs instead of --lr.")
    if changes.get("val", row.val) == 0:
        raise ConfigError("A sweep chooses on a held-out part of train; --val must be over 0.")
    if out.exists() and any(out.iterdir()) and not resume:
        raise OutputError(f"{out} is there already; choose another --out, or go on with it by --resume.")
    scores: dict[float, float] = {}
    for lr in tried:
        say(f"lr {lr:g}")
        _, outcome = train(
            data, out / f"lr-{lr:g}", recipe=recipe, changes={**changes, "lr": lr}, resume=resume, watch=watch, **how
        )
        if outcome.stopped:
            return {"stopped": True}
        scores[lr] = last_top1(RunFolder.open(out / f"lr-{lr:g}"))
    best = max(scores, key=lambda lr: (scores[lr], -lr))
    found: dict[str, Any] = {
        "recipe": recipe,
        "lrs": {f"{lr:g}": score for lr, score in scores.items()},
        "lr": best,
        "final": None,
    }
    if final:
        say(f"final run on everything, lr {best:g}")
        outcome = _final(data, out, recipe, {**changes, "lr": best, "val": 0.0}, resume, watch, how)
        found["final"] = str(out / "final")
        found["stopped"] = outcome.stopped
    from vitkit.checkpoints.atomic import staging

    with staging(out) as beside:
        (beside / "sweep.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _final(
    data: str | Path,
    out: Path,
    recipe: str,
    changes: Mapping[str, Any],
    resume: bool,
    watch: Watch | None,
    how: Mapping[str, Any],
) -> Outcome:
    return train(data, out / "final", recipe=recipe, changes=changes, resume=resume, watch=watch, **how)[1]


def last_top1(run: RunFolder) -> float:
    """Accuracy of a run's last weights on its validation part."""
    return next(row["top1"] for row in reversed(run.metrics()) if row["event"] == "val" and row["weights"] == "last")
