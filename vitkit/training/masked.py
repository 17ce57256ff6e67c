"""Masked patch prediction, the paper's self-supervision (B.1.2): hide half of the patches, and predict what they show.

Legend: B images, C channels, H x W pixels, P patch side, N patches, M = N // 2 corrupted patches, D width.

Half of the patch embeddings are corrupted: 80% of these become the learnt mask token, 10% another patch's embedding,
and 10% stay as they are. The token after the last block at each corrupted place predicts its patch, by one of TARGETS.

Where the paper leaves a choice: exactly half of the patches of every image are corrupted, and "another patch" is one of
the same image. So an image's corruption is a function of (seed, step, index) alone, whatever the batch and the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError, pick
from vitkit.model.config import ViTConfig
from vitkit.model.inputs import validate_and_pad
from vitkit.model.vit import ViT
from vitkit.types import Array

MASKED, SWAPPED = 0.8, 0.1  # shares of the corrupted patches; the rest is kept
LEVELS = 8  # of a colour channel: 3 bits
SIDE = 4  # of the downsized patch
MOST_CHANNELS = 4  # for colour classes: there are 8^C
VALIDATION = -1  # the step of masks that do not change: for validation and pictures
GREY = 128  # the mask token in pictures
GOLDEN = -0x61C8864680B583EB  # SplitMix64's step: 2^64 / the golden ratio, as int64
_PURPOSE = 7  # part of the key, so that masks share no random numbers with another purpose


def _hashed(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers (the last steps of SplitMix64): integers only, so every device agrees."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def keys_of(seed: int, step: int, index: Tensor) -> Tensor:
    """Return one key per image, [B] int64: the source of its random numbers.

    Args:
        seed: the run's seed.
        step: the training step, from 0, or VALIDATION.
        index: [B], the position of each image in its source.
    """
    key = torch.tensor(_PURPOSE, dtype=torch.int64, device=index.device)
    for number in (seed % 2**63, step, index):
        key = _hashed(key + number)
    return key


@dataclass(frozen=True)
class Corruption:
    """What happens to the patch embeddings of a batch.

    Args:
        places: [B, M], the corrupted patches.
        masked: [B, N], True where the mask token stands.
        shown: [B, N], the patch whose embedding stands at each place: its own, or another's.
    """

    places: Tensor
    masked: Tensor
    shown: Tensor

    @classmethod
    def draw(cls, keys: Tensor, patches: int) -> Corruption:
        """Draw the corruption of each image from its key.

        Args:
            keys: [B], see `keys_of`.
            patches: N, at least 2.
        """
        own = torch.arange(patches, device=keys.device)
        count = 1 + torch.arange(3 * patches, device=keys.device).view(3, -1)
        which, what, other = _hashed(keys[:, None, None] + count * GOLDEN).unbind(1)  # each [B, N]
        places = which.argsort(dim=1, stable=True)[:, : patches // 2]
        corrupted = torch.zeros_like(which, dtype=torch.bool).scatter(1, places, True)
        chance = ((what >> 40) & (2**24 - 1)).float() / 2**24  # [B, N] in [0, 1)
        swapped = corrupted & (chance >= MASKED) & (chance < MASKED + SWAPPED)
        away = 1 + (other & (2**62 - 1)) % max(patches - 1, 1)  # 1 to N - 1: never the patch itself
        return cls(places, corrupted & (chance < MASKED), torch.where(swapped, (own + away) % patches, own))

    def apply(self, z: Tensor, mask_token: Tensor) -> Tensor:
        """Corrupt patch embeddings [B, N, D], before positions are added.

        Args:
            z: the embeddings.
            mask_token: [1, 1, D].
        """
        rows = torch.arange(len(z), device=z.device)[:, None]
        z = z[
            rows, self.shown
        ]  # a patch may be shown more than once: unlike gather, this sums gradients in a fixed order
        return torch.where(self.masked[:, :, None], mask_token.to(z.dtype), z)


def cut(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cut pixels into patches: [B, C, H, W] -> [B, N, C, P, P].

    Args:
        x: the pixels.
        grid: (rows, columns) of patches.
    """
    (B, C, H, W), (rows, columns) = x.shape, grid
    x = x.reshape(B, C, rows, H // rows, columns, W // columns).permute(0, 2, 4, 1, 3, 5)
    return x.flatten(1, 2)


def joined(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Join patches to pixels, the reverse of `cut`: [B, N, C, P, P] -> [B, C, H, W]."""
    x = patches.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5)  # [B, C, rows, P, columns, P]
    return x.flatten(4, 5).flatten(2, 3)


def colour_classes(levels: Tensor) -> Tensor:
    """Return the 3-bit colour of 8-bit colours: [..., C, cells] in 0..255 -> [..., cells] in 0..8^C - 1.

    The three highest bits of the first channel come first: of RGB (255, 0, 32), that is 7 x 64 + 0 x 8 + 1 = 449.
    """
    bits = (levels / (256 // LEVELS)).floor().long().clamp(0, LEVELS - 1)
    found = torch.zeros_like(bits[..., 0, :])
    for channel in bits.unbind(-2):
        found = found * LEVELS + channel
    return found


def class_colours(classes: Tensor, channels: int) -> Tensor:
    """Return the 8-bit colour in the middle of each class: [..., cells] -> [..., C, cells]."""
    bits = [classes // LEVELS**c % LEVELS for c in reversed(range(channels))]
    return torch.stack(bits, -2).float() * (256 // LEVELS) + 256 // LEVELS // 2


@dataclass(frozen=True)
class Target:
    """What is predicted of a patch.

    Args:
        words: a description.
        side: the patch is averaged down to side x side colour cells of 3 bits; None for the pixels themselves.
    """

    words: str
    side: int | None

    def outputs(self, channels: int, pixels: int) -> int:
        """Return the number of outputs per patch of `pixels` pixels."""
        return pixels * channels if self.side is None else self.side**2 * LEVELS**channels

    def of(self, patches: Tensor, levels: Tensor) -> Tensor:
        """Return what the predictor has to say.

        Args:
            patches: [B, M, C, P, P], normalised as the model gets them.
            levels: the same in 8-bit levels.

        Returns:
            Classes [B, M, cells], or pixels [B, M, C P^2].
        """
        if self.side is None:
            return patches.flatten(2)
        cells = F.adaptive_avg_pool2d(levels.flatten(0, 1), self.side)  # [B M, C, side, side]
        return colour_classes(cells.flatten(2)).unflatten(0, levels.shape[:2])

    def loss(self, predicted: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each image [B], a mean over its corrupted patches, and the share of right colours [B].

        Args:
            predicted: [B, M, outputs].
            wanted: the result of `of`.
        """
        if self.side is None:
            loss = (predicted - wanted).square().mean((1, 2))
            return loss, torch.zeros_like(loss)
        logits = predicted.unflatten(2, (wanted.shape[2], -1))  # [B, M, cells, 8^C]
        loss = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view(len(logits), -1)
        return loss.mean(1), (logits.detach().argmax(-1) == wanted).float().mean((1, 2))


TARGETS: dict[str, Target] = {
    "mean": Target("the mean colour of the patch at 3 bits per channel", 1),
    "4x4": Target("the patch averaged down to 4 x 4 cells, each a colour of 3 bits per channel", SIDE),
    "patch": Target("every pixel of the patch, by regression", None),
}


def check(config: ViTConfig, target: str) -> None:
    """Refuse a model that a target does not fit.

    Args:
        config: the architecture.
        target: a row of TARGETS.

    Raises:
        ConfigError: with the reason, and what to use instead.
    """
    side = pick(TARGETS, target, "target").side
    height, rows = config.image_hw[0], config.grid[0]
    if config.num_patches < 2:
        raise ConfigError("Masked patch prediction needs images of at least two patches; use a smaller patch_size.")
    if side is not None and config.num_channels > MOST_CHANNELS:
        raise ConfigError(
            f"--target {target} has 8^C colour classes, too many for C = {config.num_channels} channels; use --target "
            f"patch."
        )
    if side is not None and side > height // rows:
        raise ConfigError(f"--target {target} needs patches of at least {side} pixels; use --target mean or patch.")


class MaskedPatches(nn.Module):
    """A ViT with what masked patch prediction adds: the mask token, and a linear predictor of the target.

    Args:
        model: the ViT, trained in place.
        target: a row of TARGETS.
    """

    def __init__(self, model: ViT, target: str) -> None:
        super().__init__()
        self.mean: Tensor
        self.std: Tensor
        c, self.target = model.config, TARGETS[target]
        check(c, target)
        device = next(model.parameters()).device
        side = -(-c.image_hw[0] // c.grid[0])
        self.vit = model
        self.mask_token = nn.Parameter(torch.zeros(1, 1, c.hidden_size, device=device))
        self.predictor = nn.Linear(c.hidden_size, self.target.outputs(c.num_channels, side**2), device=device)
        nn.init.zeros_(self.predictor.weight)  # as every new head
        nn.init.zeros_(self.predictor.bias)
        spec = model.input_spec
        for name, values in (("mean", spec.mean), ("std", spec.std)):
            self.register_buffer(name, torch.tensor(values, device=device)[:, None, None], persistent=False)

    def forward(self, x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss [B] and the share of right colours [B] of each image.

        Args:
            x: pixels [B, C, H, W], normalised as the model's input_spec says.
            keys: [B], see `keys_of`.
        """
        predicted, corruption = self.predict(x, keys)
        patches, levels = (_at(part, corruption.places) for part in self.patches(x))
        return self.target.loss(predicted.float(), self.target.of(patches, levels))

    def predict(self, x: Tensor, keys: Tensor) -> tuple[Tensor, Corruption]:
        """Return the predictions [B, M, outputs], and the corruption that they are for."""
        corruption = Corruption.draw(keys, self.vit.config.num_patches)
        # E of Eq. 1 is followed by the corruption, and the rest of the model stays as it is.
        hook = self.vit.patch_embedding.register_forward_hook(
            lambda module, given, out: (corruption.apply(out[0], self.mask_token), out[1])
        )
        try:
            tokens = self.vit.tokens(x)[:, self.vit.config.num_prefix_tokens :]  # [B, N, D]
        finally:
            hook.remove()
        return self.predictor(_at(tokens, corruption.places)), corruption

    def patches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cut pixels into patches [B, N, C, P, P]: as they are, and in 8-bit levels."""
        x = validate_and_pad(x, self.vit.config)
        levels = ((x * self.std + self.mean) * 255).round().clamp(0, 255)
        return cut(x, self.vit.config.grid), cut(levels, self.vit.config.grid)

    @torch.no_grad()
    def pictures(self, x: Tensor, keys: Tensor) -> dict[str, Array]:
        """Return what the model saw and said, as images [B, H, W, C] uint8.

        Args:
            x: pixels, normalised.
            keys: see `keys_of`.

        Returns:
            `photo`; `masked`, grey where the mask token stands and another patch where one took its place; and
            `predicted`, with the predictions at the corrupted places.
        """
        predicted, corruption = self.predict(x, keys)
        _, levels = self.patches(x)
        grid, shape = self.vit.config.grid, levels.shape[2:]
        masked = _at(levels, corruption.shown)
        masked = torch.where(corruption.masked[:, :, None, None, None], GREY, masked)
        said = self._painted(predicted.float(), shape)
        places = corruption.places[:, :, None, None, None].expand_as(said)
        found = {"photo": levels, "masked": masked, "predicted": levels.scatter(1, places, said)}
        return {
            name: joined(patches, grid).permute(0, 2, 3, 1).to(torch.uint8).cpu().numpy()
            for name, patches in found.items()
        }

    def _painted(self, predicted: Tensor, shape: torch.Size) -> Tensor:
        """Turn predictions [B, M, outputs] into patches [B, M, C, P, P] in 8-bit levels."""
        side = self.target.side
        if side is None:
            return ((predicted.unflatten(2, shape) * self.std + self.mean) * 255).round().clamp(0, 255)
        classes = predicted.unflatten(2, (side**2, -1)).argmax(-1)  # [B, M, cells]
        cells = class_colours(classes, shape[0]).unflatten(-1, (side, side)).flatten(0, 1)
        return F.interpolate(cells, size=tuple(shape[1:]), mode="nearest").unflatten(0, predicted.shape[:2])


def _at(patches: Tensor, places: Tensor) -> Tensor:
    """Select patches: [B, N, ...] -> [B, M, ...]."""
    rest = patches.shape[2:]
    return patches.gather(1, places.view(*places.shape, *(1 for _ in rest)).expand(*places.shape, *rest))
