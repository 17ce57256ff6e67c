"""Augmentation of small images on the device that trains: all images lie there, and a batch is computed at once.

The operations and their probabilities are those of augment.py and randaugment.py; the random numbers and the rounding
are not. Each random number is a hash of (seed, epoch, index, its number), in whole numbers, so every device draws the
same ones, and an image's pixels do not depend on the others in its batch. Two things differ from the CPU's order:

- Crop, flip and geometric operations are one change of coordinates, so pixels are interpolated once.
- The geometric operations of RandAugment come before its colour operations.

Legend: B images, C channels, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data.augment import Augment
from vitkit.data.base import Source
from vitkit.data.preprocess import resized
from vitkit.data.randaugment import FILL, OPERATIONS, TRIVIAL, factor
from vitkit.errors import ConfigError
from vitkit.model.config import InputSpec

TRIES = 10  # at a box or a rectangle that fits, as in augment.py
LEVELS = 256
NOISE = 2**16  # number of the first random number of noise; the others have lower ones
# SplitMix64 (Steele, Lea and Flood, 2014), whose 64-bit numbers are written as signed ones.
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's finalizer: a bijection of 64-bit numbers; products wrap around."""
    z = (z ^ _right(z, 30)) * FIRST
    z = (z ^ _right(z, 27)) * SECOND
    return z ^ _right(z, 31)


def _right(z: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of signed numbers repeats the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def uniforms(key: Tensor, count: int, first: int = 0) -> Tensor:
    """Return uniform random numbers in [0, 1), [B, count] float32, each a function of its row's key and its number.

    They have 23 bits, so that n times such a number is below n in float32 too.

    Args:
        key: [B] int64; see `keys`.
        count: numbers per row.
        first: number of the first; two purposes must not share numbers (default: 0).
    """
    numbers = torch.arange(first + 1, first + count + 1, device=key.device)
    return _right(_mixed(key[:, None] + numbers * GAMMA), 41).float() * 2.0**-23


def keys(seed: int, rows: Tensor) -> Tensor:
    """Return the key of each row, [B] int64.

    Args:
        seed: the run's seed.
        rows: [B, 2] int64, (epoch, index) of each image.
    """
    z = _mixed(torch.full_like(rows[:, 0], (seed + 2**63) % 2**64 - 2**63) * GAMMA + rows[:, 0])
    return _mixed(z * GAMMA + rows[:, 1])


def check(how: Augment, spec: InputSpec, source: Source, device: torch.device) -> None:
    """Refuse what this file does not compute.

    Args:
        how: which augmentations.
        spec: the input that the model expects.
        source: the images.
        device: where to compute.

    Raises:
        ConfigError: with the reason, and what to use instead.
    """
    images = source.array()
    count, (H, W) = len(spec.mean), spec.size
    reason = ""
    if device.type not in ("cpu", "cuda"):
        reason = f"a CUDA device or the CPU; got {device.type}"
    elif images is None:
        reason = "images of one size in memory, such as idx:, cifar10: or vitkit.data.Pixels"
    elif images.shape[3] != count:
        reason = f"images with the model's {count} channels; these have {images.shape[3]}"
    elif spec.channels == "raw" and (how.rand_layers or how.trivial or how.color_jitter):
        reason = "RGB or gray images for its colour operations"
    elif (how.interpolation or spec.interpolation) != "bilinear":
        reason = f"bilinear interpolation; this recipe has {how.interpolation or spec.interpolation}"
    elif how.scale is not None and (images.shape[1] > H or images.shape[2] > W):
        reason = f"images no larger than the model's {W} x {H} pixels; these have {images.shape[2]} x {images.shape[1]}"
    elif how.scale is None and not images.shape[1:3] == (H, W) == resized(W, H, spec)[::-1]:
        reason = f"images of the model's {W} x {H} pixels where no crop is resized"
    if reason:
        raise ConfigError(f"Augmentation on the device needs {reason}. Use --augment-on cpu (augment_on='cpu').")


class OnDevice:
    """Turns rows (epoch, index) into augmented pixels, [B, C, H, W] uint8, on a device.

    Args:
        source: images of one size in memory, copied to the device here.
        spec: the input that the model expects.
        how: which augmentations.
        seed: the run's seed.
        device: where to compute.

    Raises:
        ConfigError: something in `how` or `source` is not computed on the device.
    """

    def __init__(self, source: Source, spec: InputSpec, how: Augment, seed: int, device: torch.device) -> None:
        check(how, spec, source, device)
        array = source.array()
        assert array is not None  # `check` has seen it
        self.images = torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2))).to(device)
        self.spec, self.how, self.seed, self.device = spec, how, seed, device
        colours = torch.tensor([spec.mean, spec.std], device=device)[:, None, :, None, None]
        self.mean, self.std = colours[0], colours[1]  # [1, C, 1, 1]
        self.whole = torch.tensor([0.0, 0.0, *reversed(self.images.shape[2:])], device=device)
        self.levels = torch.arange(LEVELS, dtype=torch.float64, device=device)
        self.strengths = torch.tensor(list(TRIVIAL.values()), device=device).T.contiguous()
        self.names = tuple(TRIVIAL if how.trivial else OPERATIONS)
        self.numbers = {name: i for i, name in enumerate(self.names)}

    def __call__(self, rows: Tensor) -> Tensor:
        """Make the images of some rows, [B, 2] int64 on the device; nothing here waits for it."""
        key, how = keys(self.seed, rows), self.how
        layers = 1 if how.trivial else how.rand_layers
        draws = _Draws(uniforms(key, 64 + 8 * layers))
        x = self.images.index_select(0, rows[:, 1])
        boxes, flips, shifts = self._boxes(draws), draws.next() < how.flip, draws.some(2)
        plan = [self._operation(draws) for _ in range(layers)]
        x = self._geometry(x, boxes, flips, shifts, plan)
        for which, strength, _, place in plan:
            x = self._colours(x, which, strength, place)
        if how.color_jitter:
            x = self._jitter(x, draws)
        if how.erase:
            x = self._erase(x, key, draws)
        return x

    def _boxes(self, draws: _Draws) -> Tensor:
        """Draw the crops as `random_box` does: [B, 4], left, top, width and height in pixels of the images."""
        H, W = self.images.shape[2:]
        areas, ratios, places = draws.some(TRIES), draws.some(TRIES), draws.some(2)
        if self.how.scale is None:
            return self.whole.expand(len(areas), 4)
        aspect = _log_uniform(ratios, *self.how.ratio)
        area = _between(areas, *self.how.scale) * (H * W)
        w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
        fits = (w > 0) & (w <= W) & (h > 0) & (h <= H)
        least, most = self.how.ratio  # of the largest centred box, if none fits
        wide = float(min(W, max(round(H * most), 1)) if most < W / H else W)
        high = float(min(H, max(round(W / least), 1)) if least > W / H else H)
        w, h = _first(w, fits, wide), _first(h, fits, high)
        left, top = (places[:, 0] * (W - w + 1)).floor(), (places[:, 1] * (H - h + 1)).floor()
        none = ~fits.any(1)
        left, top = torch.where(none, (W - w).div(2).floor(), left), torch.where(none, (H - h).div(2).floor(), top)
        return torch.stack([left, top, w, h], 1)

    def _operation(self, draws: _Draws) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw one operation per image: its number [B], strength [B], sign [B] and place [B, 2]."""
        which = (draws.next() * len(self.names)).floor().long()
        amount, sign, place = draws.next(), torch.where(draws.next() < 0.5, 1.0, -1.0), draws.some(2)
        if not self.how.trivial:
            return which, torch.full_like(amount, self.how.rand_magnitude), sign, place
        low, high = self.strengths[:, which]
        return which, low + (high - low) * amount, sign, place

    def _is(self, which: Tensor, name: str) -> Tensor:
        """Return which images have an operation, [B]; none has one that is not drawn from."""
        return which == self.numbers.get(name, -1)

    def _geometry(
        self,
        x: Tensor,
        boxes: Tensor,
        flips: Tensor,
        shifts: Tensor,
        plan: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    ) -> Tensor:
        """Crop, resize, shift, flip and do the geometric operations, by one bilinear interpolation."""
        (H, W), pad = self.spec.size, self.how.pad
        if self.how.scale is None and not pad and not plan:
            return torch.where(flips[:, None, None, None], x.flip(3), x)
        centres = [torch.arange(side, device=self.device) + 0.5 for side in (H, W)]
        v, u = torch.meshgrid(*centres, indexing="ij")
        u, v = u.expand(len(x), H, W), v.expand(len(x), H, W)  # where each pixel comes from, step by step backwards
        inside = torch.ones_like(u, dtype=torch.bool)
        for which, strength, sign, _ in reversed(plan):
            a, b, c, d, e, f = self._affine(which, strength * sign)[:, :, None, None]
            u, v = a * u + b * v + c, d * u + e * v + f
            inside = inside & (u >= 0) & (u < W) & (v >= 0) & (v < H)
        u = torch.where(flips[:, None, None], W - u, u)
        if pad:
            right, down = ((shifts * (2 * pad + 1)).floor() - pad).T[:, :, None, None]
            u, v = u + right, v + down
            inside = inside & (u >= 0) & (u < W) & (v >= 0) & (v < H)
        left, top, w, h = boxes.T[:, :, None, None]
        u = left + (u * (w / W) - 0.5).clamp(min=0).minimum(w - 1)  # a crop's border is repeated, not its surroundings
        v = top + (v * (h / H) - 0.5).clamp(min=0).minimum(h - 1)
        height, width = x.shape[2:]
        grid = torch.stack([(2 * u + 1) / width - 1, (2 * v + 1) / height - 1], 3)
        out = F.grid_sample(x.float(), grid, "bilinear", "border", align_corners=False)
        return torch.where(inside[:, None], out, float(FILL)).round_().to(torch.uint8)

    def _affine(self, which: Tensor, m: Tensor) -> Tensor:
        """Return (a, b, c, d, e, f) of each image, [6, B]: (x, y) comes from (a x + b y + c, d x + e y + f).

        Args:
            which: [B], the operation of each image.
            m: [B], its strength, with a sign.
        """
        H, W = self.spec.size
        one, zero = torch.ones_like(m), torch.zeros_like(m)
        angle = torch.where(self._is(which, "rotate"), m * math.radians(3.0), zero)
        cos, sin = angle.cos(), angle.sin()
        far = m / 10 * (100 / 224)
        b = torch.where(self._is(which, "shear_x"), 0.03 * m, -sin)
        d = torch.where(self._is(which, "shear_y"), 0.03 * m, sin)
        c = W / 2 * (one - cos) + H / 2 * sin + torch.where(self._is(which, "translate_x"), far * W, zero)
        f = H / 2 * (one - cos) - W / 2 * sin + torch.where(self._is(which, "translate_y"), far * H, zero)
        return torch.stack([cos, b, c, d, cos, f])

    def _colours(self, x: Tensor, which: Tensor, m: Tensor, place: Tensor) -> Tensor:
        """Do each image's operation on levels or neighbours; images with a geometric one stay as they are."""
        x = self._table(x, which, m).gather(2, x.flatten(2).long()).view_as(x)
        strength = factor(m)[:, None, None, None]
        if x.shape[1] == 3:
            gray = _luma(x)[:, None]
            x = torch.where(self._is(which, "color")[:, None, None, None], _blend(gray, x, strength), x)
        x = torch.where(self._is(which, "sharpness")[:, None, None, None], _blend(_smooth(x), x, strength), x)
        if "cutout" not in self.numbers:
            return x
        H, W = x.shape[2:]
        half = (4 / 224 * min(H, W) * m).round()
        top, left = (place[:, 1] * H).floor() - half, (place[:, 0] * W).floor() - half
        inside = _rectangle(top, left, 2 * half, 2 * half, H, W)
        return torch.where((inside & self._is(which, "cutout")[:, None, None])[:, None], FILL, x)

    def _table(self, x: Tensor, which: Tensor, m: Tensor) -> Tensor:
        """Return what each level becomes in each image and channel, [B, C, 256] uint8."""
        levels = self.levels  # [256] float64, in which every operation rounds as Pillow and numpy do
        B, C, H, W = x.shape
        seen = torch.zeros(B, C, LEVELS, dtype=torch.int32, device=x.device)
        seen.scatter_add_(2, x.flatten(2).long(), seen.new_ones(1).expand(B, C, H * W))
        low = (seen > 0).int().argmax(2, keepdim=True)
        high = (LEVELS - 1) - (seen > 0).flip(2).int().argmax(2, keepdim=True)
        scale = (LEVELS - 1) / (high - low).double()
        stretched = torch.where(high > low, levels * scale - low * scale, levels)

        last = seen.gather(2, high)
        step = (H * W - last) // (LEVELS - 1)
        before = seen.cumsum(2) - seen
        spread = torch.where(step > 0, (step // 2 + before) // step.clamp(min=1), levels)

        m = m.double()[:, None, None]
        gray = _luma(x) if C == 3 else x[:, 0]
        mean = (gray.flatten(1).sum(1, dtype=torch.int64).double() / (H * W) + 0.5).floor()[:, None, None]
        bits = (0.4 * m).floor().clamp(0, 8)
        unit = 2.0 ** (8 - bits)
        made = {
            "autocontrast": stretched,
            "equalize": spread,
            "invert": LEVELS - 1 - levels,
            "posterize": (levels / unit).floor() * unit,
            "solarize": torch.where(levels < (25.6 * m).floor(), levels, LEVELS - 1 - levels),
            "contrast": mean + (levels - mean) * factor(m),
            "brightness": levels * factor(m),
            "solarize_add": torch.where(levels < 128, levels + (11 * m).floor(), levels),
        }
        out = levels.expand(B, C, LEVELS)
        for name, values in made.items():
            if name in self.numbers:
                out = torch.where(self._is(which, name)[:, None, None], values, out)
        return out.clamp(0, LEVELS - 1).to(torch.uint8)

    def _jitter(self, x: Tensor, draws: _Draws) -> Tensor:
        """Change brightness, contrast and saturation as `color_jitter` does, in an order of each image's own."""
        strength = self.how.color_jitter
        factors = _between(draws.some(3), max(0.0, 1 - strength), 1 + strength)
        order = draws.some(3).argsort(1)
        z = x.float()
        for turn in range(3):
            chosen = order[:, turn]
            amount = factors.gather(1, chosen[:, None])[:, :, None, None]
            gray = (z[:, :1] * 0.299 + z[:, 1:2] * 0.587 + z[:, 2:] * 0.114) if x.shape[1] == 3 else z
            mean = gray.round().sum((1, 2, 3), dtype=torch.float64).div(gray[0].numel()).float()
            centre = torch.where((chosen == 1)[:, None, None, None], mean[:, None, None, None], gray)
            centre = torch.where((chosen == 0)[:, None, None, None], 0.0, centre)
            z = ((z - centre) * amount + centre).clamp_(0, 255)
        return z.round_().to(torch.uint8)

    def _erase(self, x: Tensor, key: Tensor, draws: _Draws) -> Tensor:
        """Erase a rectangle in some images, as `random_erase` does."""
        how, (H, W) = self.how, x.shape[2:]
        wanted = draws.next() < how.erase
        area, aspect = (
            _between(draws.some(TRIES), *how.erase_area) * (H * W),
            _log_uniform(draws.some(TRIES), 0.3, 1 / 0.3),
        )
        h, w, places = (area * aspect).sqrt().round(), (area / aspect).sqrt().round(), draws.some(2)
        fits = (h > 0) & (h < H) & (w > 0) & (w < W)
        h, w = _first(h, fits, 0.0), _first(w, fits, 0.0)
        inside = _rectangle((places[:, 0] * (H - h + 1)).floor(), (places[:, 1] * (W - w + 1)).floor(), h, w, H, W)
        colour = self.mean
        if how.erase_fill == "noise":  # Box and Muller's normal numbers
            size, angle = uniforms(key, 2 * x[0].numel(), NOISE).chunk(2, 1)
            normal = (-2 * (1 - size).log()).sqrt() * (2 * math.pi * angle).cos()
            colour = colour + normal.view_as(x) * self.std
        fill = (colour * 255).round().clamp(0, 255).to(torch.uint8)
        return torch.where((inside & wanted[:, None, None])[:, None], fill, x)


class _Draws:
    """Random numbers of each image, [B, n], handed out in order."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.taken = numbers, 0

    def some(self, count: int) -> Tensor:
        """Return the next numbers, [B, count]."""
        self.taken += count
        assert self.taken <= self.numbers.shape[1]
        return self.numbers[:, self.taken - count : self.taken]

    def next(self) -> Tensor:
        """Return the next number, [B]."""
        return self.some(1)[:, 0]


def _between(u: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * u


def _log_uniform(u: Tensor, low: float, high: float) -> Tensor:
    return _between(u, math.log(low), math.log(high)).exp()


def _first(values: Tensor, fits: Tensor, otherwise: float) -> Tensor:
    """Return the first value of each row that fits, [B]."""
    rank = fits * torch.arange(fits.shape[1], 0, -1, device=fits.device)
    found = values.gather(1, rank.argmax(1, keepdim=True))[:, 0]
    return torch.where(fits.any(1), found, otherwise)


def _rectangle(top: Tensor, left: Tensor, height: Tensor, width: Tensor, H: int, W: int) -> Tensor:
    """Return the pixels inside each image's rectangle, [B, H, W]."""
    y, x = (torch.arange(side, device=top.device)[None] for side in (H, W))
    rows = (y >= top[:, None]) & (y < (top + height)[:, None])
    columns = (x >= left[:, None]) & (x < (left + width)[:, None])
    return rows[:, :, None] & columns[:, None, :]


def _luma(x: Tensor) -> Tensor:
    """Return Pillow's gray of RGB images, [B, H, W] uint8."""
    red, green, blue = x.int().unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)


def _smooth(x: Tensor) -> Tensor:
    """Pillow's SMOOTH filter: the mean of 3 x 3 pixels, in which the centre counts five times; borders stay."""
    z = x.float()
    H, W = z.shape[2:]
    sums = 4 * z[:, :, 1:-1, 1:-1]
    for down in range(3):
        for right in range(3):
            sums = sums + z[:, :, down : down + H - 2, right : right + W - 2]
    out = x.clone()
    out[:, :, 1:-1, 1:-1] = ((sums + 6.5) / 13).floor().to(torch.uint8)
    return out


def _blend(low: Tensor, x: Tensor, strength: Tensor) -> Tensor:
    """Pillow's blend: 0 gives `low`, 1 gives x, and beyond that it extrapolates."""
    z = low.float()
    return (z + strength * (x.float() - z)).clamp(0, 255).to(torch.uint8)
