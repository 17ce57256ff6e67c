"""ResNets as Big Transfer has them (arXiv 1912.11370), the paper's baselines, and the part of one that begins a hybrid.

Legend: B images, C channels, H x W pixels, K classes. A stage halves the resolution, except the first.

There are two bottlenecks. A ResNet of its own is pre-activation: GroupNorm and ReLU come before each convolution. In
front of a Transformer (section 3.1, "Hybrid Architecture") they come after it, and padding is TensorFlow's SAME: both
as in the authors' code, which the published weights were trained with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitkit.model.backbone import Backbone
from vitkit.model.checks import pair
from vitkit.model.config import InputSpec
from vitkit.model.init import lecun_normal_
from vitkit.model.inputs import checked
from vitkit.model.parts.layers import drop_path
from vitkit.model.resnet_config import ResNetConfig


def _by_variance(eps: float) -> Callable[[Tensor], Tensor]:
    """(w - mean) / sqrt(variance + eps), by the function that timm and transformers use, for equal rounding."""
    return lambda w: F.batch_norm(w.flatten(1)[None], None, None, training=True, eps=eps).view_as(w)


def _by_deviation(eps: float) -> Callable[[Tensor], Tensor]:
    """(w - mean) / (standard deviation + eps)."""

    def standardise(w: Tensor) -> Tensor:
        variance, mean = torch.var_mean(w, (1, 2, 3), keepdim=True, correction=0)
        return (w - mean) / (variance.sqrt() + eps)

    return standardise


# How kernels are standardised, and the epsilon of GroupNorm.
STANDARDISATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "bit": (_by_variance(1e-10), 1e-5),
    "google": (_by_deviation(1e-5), 1e-6),
    "timm": (_by_variance(1e-8), 1e-5),
}


class StdConv(nn.Conv2d):
    """A convolution whose kernels have mean 0 and variance 1 (weight standardisation, arXiv 1903.10520).

    Args:
        channels: of the input.
        out: channels of the output.
        kernel: side of the kernel.
        stride: between two outputs.
        how: a row of STANDARDISATIONS.
        same: whether padding is TensorFlow's SAME, for sides that are multiples of the stride; else it is symmetric.
    """

    def __init__(self, channels: int, out: int, kernel: int, stride: int, how: str, same: bool) -> None:
        super().__init__(channels, out, kernel, stride, bias=False)
        self.standardise = STANDARDISATIONS[how][0]
        self.border = borders(kernel, stride, same)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, H, W] -> [B, out, H / stride, W / stride]."""
        return F.conv2d(padded(x, self.border), self.standardise(self.weight), stride=self.stride)


def borders(kernel: int, stride: int, same: bool) -> tuple[int, int]:
    """Return the zeros before and after each axis."""
    total = max(kernel - stride, 0) if same else 2 * (kernel // 2)
    return total // 2, total - total // 2


def padded(x: Tensor, border: tuple[int, int]) -> Tensor:
    """Add zeros on all four sides."""
    return F.pad(x, border * 2) if any(border) else x


class Bottleneck(nn.Module):
    """A unit of a hybrid's stem: each convolution is followed by GroupNorm, and ReLU comes after the sum.

    Args:
        channels: of the input.
        out: channels of the output.
        stride: of its 3 x 3 convolution.
        groups: of GroupNorm.
        how: a row of STANDARDISATIONS.
        rate: of stochastic depth.
    """

    same = True

    def __init__(self, channels: int, out: int, stride: int, groups: int, how: str, rate: float = 0.0) -> None:
        super().__init__()
        self.rate, narrow = rate, out // 4
        shapes = ((channels, narrow, 1, 1), (narrow, narrow, 3, stride), (narrow, out, 1, 1))
        self.conv1, self.conv2, self.conv3 = (StdConv(*shape, how, self.same) for shape in shapes)
        self.gn1, self.gn2, self.gn3 = (group_norm(width, groups, how) for width in self._norms(channels, out))
        self._set_scales()
        projects = stride != 1 or channels != out
        self.projection = StdConv(channels, out, 1, stride, how, self.same) if projects else None
        self.projection_norm = group_norm(out, groups, how) if projects and self.same else None

    def _norms(self, channels: int, out: int) -> tuple[int, int, int]:
        return out // 4, out // 4, out

    def _set_scales(self) -> None:
        nn.init.zeros_(self.gn3.weight)  # as the authors: a new unit passes its input on

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, H, W] -> [B, out, H / stride, W / stride]."""
        shortcut = x
        if self.projection is not None and self.projection_norm is not None:
            shortcut = self.projection_norm(self.projection(x))
        x = F.relu(self.gn1(self.conv1(x)))
        x = F.relu(self.gn2(self.conv2(x)))
        return F.relu(self._kept(self.gn3(self.conv3(x))) + shortcut)

    def _kept(self, branch: Tensor) -> Tensor:
        if self.training and self.rate > 0:
            branch = branch * drop_path(len(branch), self.rate, branch.device).view(-1, 1, 1, 1).to(branch.dtype)
        return branch


class PreActivationBottleneck(Bottleneck):
    """A unit of a ResNet of its own: GroupNorm and ReLU come before each convolution, the projection's included."""

    same = False

    def _norms(self, channels: int, out: int) -> tuple[int, int, int]:
        return channels, out // 4, out // 4

    def _set_scales(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, H, W] -> [B, out, H / stride, W / stride]."""
        active = F.relu(self.gn1(x))
        shortcut = x if self.projection is None else self.projection(active)
        x = self.conv2(F.relu(self.gn2(self.conv1(active))))
        return self._kept(self.conv3(F.relu(self.gn3(x)))) + shortcut


def group_norm(channels: int, groups: int, how: str) -> nn.GroupNorm:
    """Return a new GroupNorm with the epsilon of a row of STANDARDISATIONS."""
    return nn.GroupNorm(groups, channels, eps=STANDARDISATIONS[how][1])


class Root(nn.Module):
    """The first convolution, and the max-pool after it: a quarter of the resolution.

    Args:
        channels: C.
        out: channels of the output.
        groups: of GroupNorm.
        how: a row of STANDARDISATIONS.
        hybrid: whether GroupNorm and ReLU follow the convolution, and padding is SAME.
    """

    def __init__(self, channels: int, out: int, groups: int, how: str, hybrid: bool) -> None:
        super().__init__()
        self.conv = StdConv(channels, out, 7, 2, how, same=hybrid)
        self.norm = group_norm(out, groups, how) if hybrid else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, out, H / 4, W / 4]."""
        x = self.conv(x)
        if self.norm is not None:
            return F.max_pool2d(padded(F.relu(self.norm(x)), borders(3, 2, same=True)), 3, 2)
        # Big Transfer pads with 0, where most libraries pad with -infinity. ONNX Runtime does so too when it merges a
        # Pad into the max-pool after it; it leaves a concatenation alone.
        row = torch.zeros_like(x[:, :, :1])
        x = torch.cat([row, x, row], 2)
        column = torch.zeros_like(x[..., :1])
        return F.max_pool2d(torch.cat([column, x, column], 3), 3, 2)


def stages(
    unit: type[Bottleneck],
    depths: tuple[int, ...],
    widths: tuple[int, ...],
    channels: int,
    groups: int,
    how: str,
    rate: float = 0.0,
) -> nn.ModuleList:
    """Return the stages of a ResNet, each a list of units.

    Args:
        unit: the bottleneck.
        depths: units in each stage.
        widths: channels after each stage.
        channels: of the input.
        groups: of GroupNorm.
        how: a row of STANDARDISATIONS.
        rate: of stochastic depth in the last unit.
    """
    made, count = nn.ModuleList(), 0
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        units = nn.ModuleList()
        for index in range(depth):
            stride = 2 if stage and not index else 1
            units.append(unit(channels, width, stride, groups, how, rate * count / max(sum(depths) - 1, 1)))
            channels, count = width, count + 1
        made.append(units)
    return made


def initialise(model: nn.Module) -> None:
    """Initialise as Big Transfer's code does: kernels LeCun normal, the head zero.

    Args:
        model: a ResNet.
    """
    for module in model.modules():
        if isinstance(module, StdConv):
            lecun_normal_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


class HybridStem(nn.Module):
    """The ResNet before a Transformer: pixels -> the feature map that patches are cut from.

    Args:
        depths: units in each stage; none for the root alone.
        channels: C.
        how: a row of STANDARDISATIONS.
    """

    def __init__(self, depths: tuple[int, ...], channels: int, how: str) -> None:
        super().__init__()
        self.root = Root(channels, 64, 32, how, hybrid=True)
        self.stages = stages(Bottleneck, depths, tuple(256 * 2**i for i in range(len(depths))), 64, 32, how)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, channels, H / pixels, W / pixels]."""
        x = self.root(x)
        for units in self.stages:
            for unit in units:  # type: ignore[attr-defined]
                x = unit(x)
        return x


class ResNet(Backbone):
    """A ResNet; `vitkit.create("r50x1")` and `vitkit.load(source)` are the usual ways to one.

    Args:
        config: the architecture.
        input_spec: what the model expects as input (default: see InputSpec.of).
    """

    config: ResNetConfig

    def __init__(self, config: ResNetConfig, input_spec: InputSpec | None = None) -> None:
        super().__init__()
        c = self.config = config
        self.input_spec = (input_spec or InputSpec.of(c)).check(c)
        self.gradient_checkpointing, self.licence = False, ""
        how = c.standardisation
        self.root = Root(c.num_channels, c.embedding_size, c.num_groups, how, hybrid=False)
        self.stages = stages(
            PreActivationBottleneck, c.depths, c.hidden_sizes, c.embedding_size, c.num_groups, how, c.drop_path_rate
        )
        self.norm = group_norm(c.width, c.num_groups, how)
        self.dropout = nn.Dropout(c.hidden_dropout_prob)
        self.head = nn.Linear(c.width, c.num_classes) if c.num_classes else nn.Identity()
        if not self.norm.weight.is_meta:  # a model without storage is filled from a file
            initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of pixels [B, C, H, W], normalised as `input_spec` says."""
        return self.classify(self.features(x))

    def classify(self, y: Tensor) -> Tensor:
        """Logits [B, K] of features [B, width]."""
        return self.head(self.dropout(y))

    def features(self, x: Tensor) -> Tensor:
        """Return the mean of the last feature map over all places, [B, width]."""
        return self.feature_map(x).mean((2, 3))

    def feature_map(self, x: Tensor) -> Tensor:
        """Return the last feature map after GroupNorm and ReLU, [B, width, rows, columns]; a row is 32 pixels."""
        x = self.root(checked(x, self.config))
        for unit in self.units():
            if self.gradient_checkpointing and self.training:
                x = checkpoint(unit, x, use_reentrant=False)
            else:
                x = unit(x)
        return F.relu(self.norm(x))

    def units(self) -> Iterator[Bottleneck]:
        """Yield the units of all stages in order."""
        for units in self.stages:
            yield from units  # type: ignore[misc]

    def set_image_size(self, size: int | tuple[int, int]) -> None:
        """Change the image size that images are prepared for; a ResNet itself takes any size."""
        self.config = dataclasses.replace(self.config, image_size=size)
        self.input_spec = dataclasses.replace(self.input_spec, size=pair(size))
