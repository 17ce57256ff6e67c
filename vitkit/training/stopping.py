"""The best weights so far, and whether to stop early: functions of the results of the validations."""

from __future__ import annotations

from vitkit.training.state import TrainingState


def consider(progress: TrainingState, results: dict[str, tuple[float, float]], step: int) -> bool:
    """Compare the results of a validation with the best so far; return whether it has a new best.

    The best has the highest score; among equals, the lower loss; then the later step. A tie is a new best, so that the
    latest of equal weights is kept, but it does not count as better: the run can still stop early.

    Args:
        progress: its `best...` and `stale` fields are updated.
        results: weights (`last`, `ema`) -> (score, of which higher is better; loss).
        step: updates done.
    """
    new_best = better = False
    for which, (score, loss) in results.items():
        if progress.best is None or (score, -loss) >= (progress.best, -progress.best_loss):
            better |= progress.best is None or (score, -loss) > (progress.best, -progress.best_loss)
            progress.best, progress.best_loss, progress.best_step, progress.best_weights = score, loss, step, which
            new_best = True
    progress.stale = 0 if better else progress.stale + 1
    return new_best


def reason_to_stop(progress: TrainingState, patience: int | None) -> str:
    """Return why the run should stop now, as a sentence; empty if it should go on.

    Args:
        progress: how far the run has come.
        patience: validations in a row without a better one; None never stops.
    """
    if patience is None or progress.stale < patience:
        return ""
    count = "1 validation was" if patience == 1 else f"{patience} validations in a row were"
    return f"{count} no better than the best, at step {progress.best_step:,}"
