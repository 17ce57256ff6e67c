"""A frozen model whose answers another one learns."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.checkpoints import load
from vitkit.errors import ConfigError
from vitkit.model.backbone import Backbone
from vitkit.model.config import InputSpec


class Teacher:
    """A frozen classifier that sees the pixels of another model, and answers in the order of its classes.

    Args:
        source: its weights, anything that `vitkit.load` accepts.
        classes: the class names of the data.

    Raises:
        ConfigError: it does not know these classes.
    """

    def __init__(self, source: str, classes: Sequence[str]) -> None:
        self.model: Backbone = load(source, dtype="float32").eval().requires_grad_(False)
        self.order = _order(self.model, source, classes)
        self.source = source
        self.scale, self.shift = torch.ones(()), torch.zeros(())

    @property
    def checksum(self) -> str:
        """A checksum of its weights."""
        parts = sorted((name, zlib.crc32(p.cpu().numpy().tobytes())) for name, p in self.model.named_parameters())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def check(self, spec: InputSpec) -> None:
        """Refuse a student whose pixels the teacher cannot see.

        Args:
            spec: the input that the student expects.
        """
        own = self.model.input_spec
        if spec.channels != own.channels or len(spec.mean) != len(own.mean):
            raise ConfigError(
                f"The teacher {self.source} must see the channels of the model, {spec.channels}; it expects "
                f"{own.channels}. Choose another teacher."
            )

    def follow(self, model: Backbone) -> None:
        """Move to a model's device, and prepare to see its pixels.

        The pixels are normalised by the student's mean and deviation; pixels x scale + shift are by the teacher's.
        """
        device = next(model.parameters()).device
        self.model, self.order = self.model.to(device), self.order.to(device)
        numbers = [getattr(m.input_spec, name) for m in (model, self.model) for name in ("mean", "std")]
        mean, std, own_mean, own_std = (torch.tensor(n, dtype=torch.float64).reshape(-1, 1, 1) for n in numbers)
        self.scale = (std / own_std).float().to(device)
        self.shift = ((mean - own_mean) / own_std).float().to(device)

    def view(self, pixels: Tensor) -> Tensor:
        """Return the student's pixels [B, C, H, W] as the teacher expects them: its mean, deviation and size."""
        pixels = pixels * self.scale + self.shift
        size = self.model.input_spec.size
        if tuple(pixels.shape[2:]) == size:
            return pixels
        return F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Return its logits for the student's pixels, [B, K]."""
        return self.model(self.view(pixels))[:, self.order]


def _order(model: Backbone, source: str, classes: Sequence[str]) -> Tensor:
    """Return which of the teacher's outputs each class is."""
    names, outputs = model.input_spec.class_names, model.config.num_classes
    if outputs != len(classes):
        raise ConfigError(
            f"The teacher must know the {len(classes)} classes of the data; {source} has {outputs}. Fine-tune it on "
            f"this data first, and use that run as the teacher."
        )
    if not names:
        return torch.arange(outputs)
    if odd := next((name for name in classes if name not in names), None):
        raise ConfigError(
            f"The teacher must know the classes of the data; {source} does not have {odd!r} among its {outputs}. "
            f"Fine-tune it on this data first, and use that run as the teacher."
        )
    return torch.tensor([names.index(name) for name in classes])
