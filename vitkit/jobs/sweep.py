"""Choose the learning rate as Table 4 does: one run per rate with a part of train held out, then one on everything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.errors import ConfigError, pick
from vitkit.jobs.cells import check_place
from vitkit.jobs.train import train
from vitkit.training.loop import Watch
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
    """Train with each learning rate, choose the best on the held-out part, and train on everything with it.

    Args:
        data: anything that `vitkit.data.open_splits` accepts.
        out: folder for the runs (`lr-0.01`, ..., `final`) and sweep.json.
        recipe: a key of RECIPES.
        lrs: learning rates to try (default: the recipe's lr_choices).
        changes: fields of Recipe to change; `val` is the share that is held out.
        final: whether to train on everything at the end (default: True).
        resume: whether to resume the sweep at `out`.
        watch: called with the events of every run.
        say: called with a line of text before every run.
        how: the other arguments of `prepare`.

    Returns:
        The contents of sweep.json: {"lrs": {lr: accuracy on the held-out part}, "lr": the best, "final": its folder}.

    Raises:
        ConfigError: there are no learning rates to try, or nothing is held out.
        OutputError: `out` already holds something.
    """
    row, out = pick(RECIPES, recipe, "recipe"), Path(out).expanduser()
    changes = {name: value for name, value in (changes or {}).items() if value is not None}
    tried = sorted(set(lrs or row.lr_choices))
    if not tried:
        raise ConfigError(
            f"The recipe {recipe!r} has no learning rates to choose from; give them, such as --lrs 0.001,0.01."
        )
    if changes.pop("lr", None) is not None:
        raise ConfigError("A sweep chooses the learning rate; use --lrs instead of --lr.")
    if changes.get("val", row.val) == 0:
        raise ConfigError("A sweep compares learning rates on a held-out part of train; --val must be above 0.")
    check_place(out, resume)
    scores: dict[float, float] = {}
    for lr in tried:
        say(f"lr {lr:g}")
        _, outcome = train(
            data, out / f"lr-{lr:g}", recipe=recipe, changes={**changes, "lr": lr}, resume=resume, watch=watch, **how
        )
        if outcome.interrupted:  # even if this run was finished: the sweep is not
            return {"stopped": outcome.signal}
        scores[lr] = RunFolder.open(out / f"lr-{lr:g}").final_score()
    best = max(scores, key=lambda lr: (scores[lr], -lr))
    found: dict[str, Any] = {
        "recipe": recipe,
        "lrs": {f"{lr:g}": score for lr, score in scores.items()},
        "lr": best,
        "final": None,
    }
    if final:
        say(f"final run on all of train, lr {best:g}")
        changes |= {"lr": best, "val": 0.0}
        _, outcome = train(data, out / "final", recipe=recipe, changes=changes, resume=resume, watch=watch, **how)
        found["final"] = str(out / "final")
        found["stopped"] = outcome.signal if outcome.stopped else 0
    from vitkit.checkpoints.atomic import staging

    with staging(out) as private:
        (private / "sweep.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found
