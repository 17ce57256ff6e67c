"""Resizing many images at once gives Pillow's pixels to the bit: in plain torch, and by the kernel in its interpreter.

The interpreter is chosen when Triton is imported, so the kernel runs in a process of its own (this file as a script).
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests.speed.test_triton import mend_interpreter
from vitkit.data.preprocess import cropped
from vitkit.data.resize import BITS, FILTERS, Axis, Resize, axes, takes, weights, width_first
from vitkit.model.config import InputSpec
from vitkit.types import Array

CPU = torch.device("cpu")


def noise(width: int, height: int, seed: int = 0, channels: int = 3) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def by_pillow(image: Array, spec: InputSpec) -> Array:
    """[C, H, W], the whole image resized and then cropped: the simplest way."""
    H, W = spec.size
    across, down = axes(image.shape[1], image.shape[0], spec)
    whole = Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0])
    whole = whole.resize((across.to, down.to), getattr(Image.Resampling, spec.interpolation.upper()))
    part = whole.crop((across.first, down.first, across.first + W, down.first + H))
    return np.atleast_3d(np.asarray(part)).transpose(2, 0, 1)


def sizes(count: int, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    found = [(1, 1), (1, 30), (30, 1), (2, 3), (32, 40), (36, 45), (300, 200), (500, 60), (33, 41)]
    found += [(rng.randint(1, 120), rng.randint(1, 120)) for _ in range(count)]
    return [(w, h) for w, h in found if max(w, h) <= 40 * min(w, h)]


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("resize", ["crop", "squash"])
@pytest.mark.parametrize("size", [(24, 24), (32, 40)])
def test_the_pixels_are_pillows(interpolation: str, resize: str, size: tuple[int, int]) -> None:
    spec = InputSpec(size=size, resize=resize, crop=0.9 if resize == "crop" else 1.0, interpolation=interpolation)
    images = [noise(*of, seed) for seed, of in enumerate(sizes(30, seed=len(interpolation)))]
    images = [image for image in images if width_first(*axes(image.shape[1], image.shape[0], spec))]
    assert len(images) >= 20
    found = Resize(spec, CPU)([torch.from_numpy(image).permute(2, 0, 1) for image in images])
    for x, image in zip(found, images, strict=True):
        assert np.array_equal(x.numpy(), by_pillow(image, spec)), image.shape
        assert np.array_equal(x.numpy(), np.asarray(cropped(Image.fromarray(image), spec)).transpose(2, 0, 1))


def test_high_images_are_told_apart() -> None:
    """Pillow 13 begins with their height; where only one pass is needed, the order does not matter."""
    assert not width_first(Axis(100, 50, 0), Axis(400, 50, 0))
    assert not width_first(Axis(40, 50, 0), Axis(60, 50, 0))
    assert width_first(Axis(400, 50, 0), Axis(400, 50, 0))
    assert width_first(Axis(30, 50, 0), Axis(30, 50, 0))
    assert width_first(Axis(300, 50, 0), Axis(50, 50, 0))


def test_gray_images_and_any_strides() -> None:
    spec = InputSpec(size=(24, 24), resize="crop", crop=0.9, mean=(0.5,), std=(0.5,), channels="gray")
    image = noise(70, 50, channels=1)
    assert np.array_equal(Resize(spec, CPU)([torch.from_numpy(image).permute(2, 0, 1)])[0], by_pillow(image, spec))
    spec = InputSpec(size=(24, 24), resize="crop", crop=0.9)
    image = noise(70, 50)
    turned = torch.from_numpy(image).permute(2, 0, 1).contiguous().transpose(1, 2)
    assert np.array_equal(Resize(spec, CPU)([turned])[0], by_pillow(image.transpose(1, 0, 2).copy(), spec))


def test_images_of_the_models_size_stay_as_they_are() -> None:
    spec = InputSpec(size=(24, 24), resize="crop", crop=0.5)
    images = [torch.from_numpy(noise(24, 24, seed)).permute(2, 0, 1) for seed in range(3)]
    found = Resize(spec, CPU)(images, [True, False, True])
    assert [torch.equal(x, image) for x, image in zip(found, images, strict=True)] == [True, False, True]


def test_weights_lie_inside_the_image_and_sum_to_one() -> None:
    for axis in (Axis(9, 9, 2), Axis(100, 30, 0), Axis(30, 100, 20), Axis(2, 50, 0), Axis(1, 9, 0)):
        for interpolation in FILTERS:
            table = weights(axis, 7, interpolation)
            assert table[:, 0].min() >= 0
            assert (table[:, 0] + table.shape[1] - 1).max() <= axis.size
            assert np.abs(table[:, 1:].sum(1) - (1 << BITS)).max() < table.shape[1]
    assert np.array_equal(weights(Axis(9, 9, 2), 4, "bicubic"), [[i, 1 << BITS] for i in (2, 3, 4, 5)])


def test_what_is_not_pillows_filter_is_left_alone() -> None:
    assert takes(InputSpec(interpolation="bilinear"))
    assert not takes(InputSpec(interpolation="nearest"))
    assert not takes(InputSpec(interpolation="bicubic", backend="tensor"))


def test_few_axes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitkit.data.resize.REMEMBERED", 3)
    resize = Resize(InputSpec(size=(8, 8), resize="squash"), CPU)
    wanted = [(Axis(size, 8, 0), 8) for size in (20, 30, 20, 40, 50)]
    found = resize._on_device(wanted)
    assert [np.array_equal(t, weights(*of, "bilinear")) for t, of in zip(found, wanted, strict=True)] == [True] * 5
    assert [axis.size for axis, _ in resize._tables] == [30, 40, 50]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_gives_pillows_pixels() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.data.test_resize"]
    ran = subprocess.run(command, env=env, text=True, capture_output=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == "bicubic\nbilinear\ngray\n"


def main() -> None:
    """Compare the kernel with Pillow in Triton's interpreter."""
    from vitkit.data import triton_resize

    mend_interpreter()
    triton_resize.COLUMNS = 16
    for name, channels in (("bicubic", 3), ("bilinear", 3), ("gray", 1)):
        colours = {"mean": (0.5,) * channels, "std": (0.5,) * channels, "channels": "gray" if channels == 1 else "rgb"}
        interpolation = "bicubic" if channels == 1 else name
        spec = InputSpec(size=(9, 20), resize="crop", crop=0.9, interpolation=interpolation, **colours)
        images = [noise(w, h, w, channels) for w, h in ((40, 21), (12, 9))[: 1 + (name == "bicubic")]]
        views = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
        views[-1] = views[-1].contiguous()
        of_model = torch.from_numpy(noise(20, 9, 5, channels)).permute(2, 0, 1)
        found = Resize(spec, CPU)([*views, of_model], [*(False for _ in views), True])
        for x, image in zip(found, images, strict=False):
            assert np.array_equal(x, by_pillow(image, spec)), (name, image.shape)
        assert torch.equal(found[-1], of_model)
        print(name, flush=True)


if __name__ == "__main__":
    main()
