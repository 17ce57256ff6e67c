"""What ends a run early, in words: what happened, what to do, and what is kept."""

from __future__ import annotations

import re

from vitkit.errors import Diverged, LostWorker, OutOfMemory, OutputError, SaveFailed, VitkitError
from vitkit.runtime import out_of_memory


class Stopped(Exception):
    """A request to stop came while the loop waited for images."""


def rescuable(error: Exception) -> bool:
    """Return whether to save the run before it ends: not after a NaN, and not if saving is what failed."""
    return not isinstance(error, Diverged | OutputError)


def explain(error: Exception, step: int, kept: str, processes: int) -> Exception:
    """Return the error to raise instead of one that ended a run.

    Args:
        error: the error as it was raised.
        step: updates done.
        kept: a sentence about what is saved.
        processes: number of training processes.

    Returns:
        An error of `vitkit.errors`, or `error` itself if it is none that a user can cause.
    """
    first = (str(error).splitlines() or [""])[0][:200]
    if isinstance(error, Diverged):  # says what is kept
        return error
    if isinstance(error, BrokenPipeError):
        return OutputError(f"Nobody reads the output any more, so the run stopped. {kept}".strip())
    if isinstance(error, OutputError):
        return SaveFailed(f"{error} {kept}".strip())
    if isinstance(error, VitkitError):
        return type(error)(f"{error} {kept}".strip())
    if out_of_memory(error):
        return OutOfMemory(
            f"No memory was left at step {step} ({first or type(error).__name__}). Use --batch-size auto, a smaller "
            f"--micro-batch, --checkpointing or fewer --workers. {kept}".strip()
        )
    if processes > 1 and isinstance(error, RuntimeError) and re.search("gloo|nccl|peer|connection", str(error), re.I):
        return LostWorker(f"Another process of this run has ended or cannot be reached. {kept}".strip())
    return error
