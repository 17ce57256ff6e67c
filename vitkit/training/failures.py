"""What ends a run early, in words: what happened, what to do, and what is kept."""

from __future__ import annotations

import re
from pathlib import Path

from vitkit.data.decode import REPAIR
from vitkit.errors import BadImage, Diverged, LostWorker, OutOfMemory, OutputError, SaveFailed, VitkitError
from vitkit.runtime import out_of_memory

RESUME = "--resume"


class Stopped(Exception):
    """A request to stop came while the loop waited for images."""


def rescuable(error: Exception) -> bool:
    """Return whether to save the run before it ends: not after a NaN, and not if saving is what failed."""
    return not isinstance(error, Diverged | OutputError)


def advice(error: Exception, out: Path) -> str:
    """Return how to continue a run that an error ended.

    Args:
        error: the error.
        out: the run's folder, in which something is saved.
    """
    command = f"vitkit train --out {out} {RESUME}"
    if _broken(error):  # without the image, or with another in its place, it is other data, which resuming refuses
        return f"Leave it out: {command} --bad-images skip; or repair it and start again with a new --out."
    return f"Resume with: {command}"


def _broken(error: Exception) -> bool:
    """Return whether an image ended the run that cannot be read, however often one tries."""
    return isinstance(error, BadImage) and REPAIR in str(error)


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
    if _broken(error) and RESUME in kept:  # what to do is said with what is kept
        return BadImage(f"{str(error).replace(REPAIR, '').strip()} {kept}")
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
