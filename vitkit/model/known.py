"""What a classifier knows: how far features may lie from those of its classes before the answer is "none of these".

Each class is a Gaussian around its mean; all share one covariance of standardised features: exact along the AXES main
axes, and the same in all other directions. The distance to the nearest class is the squared Mahalanobis distance.

Legend: B images, K classes, F values per feature, r axes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import UnreadableFile
from vitkit.model.classifier import evaluating

if TYPE_CHECKING:
    from vitkit.model.backbone import Backbone

NONE = "none of these"


@dataclass(frozen=True)
class Known:
    """The classes of a model in the space of its features. Stored in a native checkpoint.

    Args:
        centre: [F], subtracted from features.
        scale: [F], divides them after that.
        means: [K, F] the classes.
        axes: [r, F] main directions within the classes, of length one.
        spread: [r] variance along each.
        rest: variance in every other direction.
        limit: distance of the farthest image that is accepted.
        accept: share of known images that `limit` was chosen to accept.
        preprocessing: the InputSpec that all this holds for, without its class names.
    """

    centre: Tensor
    scale: Tensor
    means: Tensor
    axes: Tensor
    spread: Tensor
    rest: float
    limit: float
    accept: float
    preprocessing: Mapping[str, Any]

    def distance(self, y: Tensor) -> Tensor:
        """Return the squared distance of features [B, F] to the nearest class, [B] float32."""
        centre, scale, means, axes, spread = (
            t.to(y.device) for t in (self.centre, self.scale, self.means, self.axes, self.spread)
        )
        z = (y.float() - centre) / scale
        d = z[:, None] - means  # [B, K, F]
        p = d @ axes.mT  # [B, K, r]
        along, other = (p.square() / spread).sum(-1), d.square().sum(-1) - p.square().sum(-1)
        return (along + other.clamp(min=0) / self.rest).amin(1)

    def to_text(self) -> str:
        """Return everything as one line of JSON; tensors are base64 of little-endian float32."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps(
            {name: _packed(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        )

    @classmethod
    def from_text(cls, text: str) -> Known:
        """Read what `to_text` returned.

        Raises:
            UnreadableFile: it is something else, or its parts do not fit each other.
        """
        try:
            values = json.loads(text)
            found = cls(**{f.name: _unpacked(values[f.name]) for f in fields(cls)})
            K, F = found.means.shape
            r = len(found.spread)
            assert found.centre.shape == found.scale.shape == (F,)
            assert found.axes.shape == (r, F)
            assert min(found.rest, found.limit, K) > 0
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise UnreadableFile(
                f"Expected what `vitkit probe --accept` writes about the known classes; it cannot be read ({error})."
            ) from None
        return found


def _packed(tensor: Tensor) -> dict[str, Any]:
    array = np.ascontiguousarray(tensor.cpu().numpy(), "<f4")
    return {"shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict) or "data" not in value:
        return value
    array = np.frombuffer(base64.b64decode(value["data"], validate=True), "<f4").reshape(value["shape"])
    return torch.from_numpy(array.astype(np.float32))


class Judged:
    """A model with `known`, as a classifier with one more output: the distance divided by the limit.

    An image whose last output is above 1 is none of the classes.

    Args:
        model: the model.
    """

    def __init__(self, model: Backbone) -> None:
        self.model, self.input_spec, self.config = model, model.input_spec, model.config

    def __call__(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, K + 1]."""
        known = self.model.known
        assert known is not None
        with evaluating(self.model):
            y = self.model.features(x)
            return self.judge(y, known)

    def judge(self, y: Tensor, known: Known) -> Tensor:
        """[B, D], y of Eq. 4 -> [B, K + 1]."""
        logits = self.model.classify(y).float()
        return torch.cat([logits, known.distance(self.seen(y))[:, None] / known.limit], dim=1)

    def seen(self, y: Tensor) -> Tensor:
        """Return what the head sees of features y of Eq. 4."""
        hidden = getattr(self.model, "pre_logits", None)
        return y if hidden is None else torch.tanh(hidden(y))
