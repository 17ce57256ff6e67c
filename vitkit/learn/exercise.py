"""An exercise, and how an answer to it is judged: by what it computes, next to the answer and to typical mistakes."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import InputError, pick
from vitkit.learn import attention, embedding, encoder, using
from vitkit.learn.progress import remember

Function = Callable[..., Any]
TOLERANCE = 1e-4  # of the largest value: far above rounding, far below any mistake


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One step to write.

    Args:
        title: what it is, with its equation.
        task: what to write.
        start: the signature, as code to begin with.
        inputs: makes the arguments from a seed.
        answer: computes the right result.
        mistakes: hint -> what computes the result of that mistake.
        shape: what the axes of the result are, in letters.
    """

    title: str
    task: str
    start: str
    inputs: Callable[[int], tuple[Any, ...]]
    answer: Function
    mistakes: Mapping[str, Function]
    shape: str


@dataclass(frozen=True)
class Feedback:
    """What an answer gets.

    Args:
        right: whether it is right.
        says: one or two sentences.
    """

    right: bool
    says: str

    def __bool__(self) -> bool:
        """Whether the answer is right."""
        return self.right


EXERCISES: dict[str, Exercise] = {
    name: Exercise(**row) for rooms in (embedding, attention, encoder, using) for name, row in rooms.EXERCISES.items()
}


def check(name: str, answer: Function) -> bool:
    """Print what is right or wrong about an answer, and return whether it is right.

    Args:
        name: a row of EXERCISES; `vitkit learn` lists them.
        answer: your function.

    Example:
        >>> import vitkit
        >>> vitkit.learn.check("pool", lambda z, norm: norm(z[:, 0]))
        pool: right.
        True
    """
    found = feedback(name, answer)
    print(f"{name}: {found.says}")
    if found.right:
        remember(name)
    return found.right


def feedback(name: str, answer: Function) -> Feedback:
    """Judge an answer.

    Args:
        name: a row of EXERCISES.
        answer: your function; see `EXERCISES[name].start` for its arguments.
    """
    exercise = pick(EXERCISES, name, "exercise")
    if not callable(answer):
        raise InputError(f"Expected a function to check; got {type(answer).__name__}. Start from: {exercise.start}")
    for seed in range(3):
        judged = _judge(exercise, answer, seed)
        if judged is not None:
            return Feedback(False, judged)
    return Feedback(True, "right.")


def _judge(exercise: Exercise, answer: Function, seed: int) -> str | None:
    """Return what is wrong with an answer on the inputs of one seed, or None."""
    given = exercise.inputs(seed)
    before = [x.clone() if isinstance(x, Tensor) else x for x in given]
    try:
        with torch.no_grad():
            got = answer(*given)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f" in the line `{where.line}`" if where.line and "vitkit" not in where.filename else ""
        return f"not yet. Your function stopped with {type(error).__name__}: {error}{line}. {_arguments(given)}"
    if any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in zip(given, before, strict=True)):
        return "not yet. Your function changes its arguments in place (an operator like += does); make new tensors."
    with torch.no_grad():
        right = exercise.answer(*given)
        if (kind := _kind(got, right)) is not None:
            return f"not yet. {kind}"
        if _same(got, right):
            return None
        for hint, mistake in exercise.mistakes.items():
            if _same(got, mistake(*given)):
                return f"not yet. {hint}"
    return f"not yet. {_difference(got, right, exercise.shape)}"


def _arguments(given: tuple[Any, ...]) -> str:
    shapes = [str(list(x.shape)) for x in given if isinstance(x, Tensor)]
    return f"Its tensors have the shapes {', '.join(shapes)}." if shapes else ""


def _kind(got: Any, right: Any) -> str | None:
    """Say what is wrong with the type of a result, or None."""
    if got is None:
        return "Your function returns nothing: end it with `return`."
    if got is ...:
        return "Write your code in place of the dots."
    if isinstance(right, tuple):
        if not isinstance(got, tuple | list) or len(got) != len(right):
            return f"Expected {len(right)} results, `return a, b, c`; got {type(got).__name__}."
        return next((said for a, b in zip(got, right, strict=True) if (said := _kind(a, b)) is not None), None)
    if isinstance(right, Tensor) and not isinstance(got, Tensor):
        return f"Expected a tensor; got {type(got).__name__}."
    if not isinstance(right, Tensor) and isinstance(got, Tensor) and got.numel() != 1:
        return f"Expected one number; got a tensor of shape {list(got.shape)}."
    if not isinstance(right, Tensor) and not isinstance(got, int | float | Tensor):
        return f"Expected a number; got {type(got).__name__}."
    return None


def _same(got: Any, right: Any) -> bool:
    if isinstance(right, tuple):
        return (
            isinstance(got, tuple | list)
            and len(got) == len(right)
            and all(_same(a, b) for a, b in zip(got, right, strict=True))
        )
    if not isinstance(right, Tensor):
        return math.isclose(float(got), float(right), rel_tol=1e-6)
    if not isinstance(got, Tensor) or got.shape != right.shape:
        return False
    most = max(float(right.abs().max()), 1e-6)
    return bool(((got.double() - right.double()).abs() <= TOLERANCE * most).all())


def _difference(got: Any, right: Any, shape: str) -> str:
    """Describe a result that no listed mistake explains."""
    if isinstance(right, tuple):
        wrong = [i for i, (a, b) in enumerate(zip(got, right, strict=True)) if not _same(a, b)]
        return f"Result {wrong[0] + 1} of {len(right)}: {_difference(got[wrong[0]], right[wrong[0]], shape)}"
    if not isinstance(right, Tensor):
        return f"Expected {right:,}; got {float(got):,.10g}."
    if got.shape != right.shape:
        order = ""
        if sorted(got.shape) == sorted(right.shape):
            order = " The axes are there, but in another order."
        elif got.numel() == right.numel():
            order = " The number of values is right, their arrangement is not."
        return f"Expected the shape {list(right.shape)} = {shape}; got {list(got.shape)}.{order}"
    if torch.isnan(got).any():
        return "The result contains NaN: something is divided by zero, or a softmax gets infinite values."
    off = (got.double() - right.double()).abs()
    at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    share = float((off > TOLERANCE * float(right.abs().max())).double().mean())
    return (
        f"The shape {list(right.shape)} is right, but {share:.0%} of the values are not: at {list(at)} expected "
        f"{float(right[at]):.4g}, got {float(got[at]):.4g}. None of the mistakes known here explains it."
    )
