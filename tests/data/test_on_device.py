"""Augmentation on the device: Pillow's pixels within one level, and a function of (seed, epoch, index) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.images import picture
from tests.data.test_augment import uniform
from vitkit.data import Augment, Mix, TrainLoader
from vitkit.data.augment import color_jitter
from vitkit.data.base import Pixels, Subset
from vitkit.data.mix import apply, plan
from vitkit.data.on_device import OnDevice, keys, uniforms
from vitkit.data.order import Order
from vitkit.data.preprocess import normalize, resize_tensor
from vitkit.data.randaugment import OPERATIONS, TRIVIAL, trivial_augment
from vitkit.errors import ConfigError
from vitkit.model.config import InputSpec

SPEC, GRAY = InputSpec(size=(32, 32)), InputSpec(size=(28, 28), mean=(0.3,), std=(0.4,), channels="gray")
STRONG = Augment(scale=(0.3, 1.0), pad=3, rand_layers=2, rand_magnitude=12, color_jitter=0.4, erase=0.5)
CPU = torch.device("cpu")


def source(channels: int = 3, side: int = 32, count: int = 24) -> Pixels:
    images = [np.array(picture(i, (side, side)).convert("RGB" if channels == 3 else "L")) for i in range(count)]
    return Pixels(np.stack(images), np.arange(count) % 3, ("a", "b", "c"))


def made(how: Augment, channels: int = 3, seed: int = 0) -> OnDevice:
    return (
        OnDevice(source(channels), SPEC, how, seed, CPU)
        if channels == 3
        else OnDevice(source(1, 28), GRAY, how, seed, CPU)
    )


class Fixed:
    """A generator whose uniform numbers are all 0.3, and whose integers follow from them."""

    def random(self) -> float:
        return 0.3

    def integers(self, low: int, high: int) -> int:
        return low + int(0.3 * (high - low))


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("magnitude", [0.0, 3.3, 10.0, 15.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_pillows_within_one_level(name: str, magnitude: float, channels: int) -> None:
    device = made(Augment(scale=None, flip=0.0, rand_layers=1, rand_magnitude=magnitude), channels)
    x, count = device.images, len(device.images)
    which, strength = torch.full((count,), device.numbers[name]), torch.full((count,), magnitude)
    place = torch.full((count, 2), 0.3)
    plan = [(which, strength, torch.ones(count), place)]
    still = torch.zeros(count, dtype=torch.bool)
    y = device._geometry(x, device.whole.expand(count, 4), still, torch.zeros(count, 2), plan)
    y = device._colours(y, which, strength, place).permute(0, 2, 3, 1).numpy()
    for image, found in zip(x.permute(0, 2, 3, 1).numpy(), y, strict=True):
        pillow = Image.fromarray(image if channels == 3 else image[:, :, 0])
        wanted = np.atleast_3d(np.array(OPERATIONS[name](pillow, magnitude, Fixed())))
        assert np.abs(found.astype(int) - wanted.astype(int)).max() <= 1


def test_a_crop_is_resized_as_on_the_cpu() -> None:
    device = made(Augment(scale=(0.2, 0.9), ratio=(0.5, 2.0), flip=0.0))
    rows = [(epoch, i) for epoch in range(4) for i in range(24)]
    from vitkit.data.on_device import _Draws

    boxes = device._boxes(_Draws(uniforms(keys(0, torch.tensor(rows)), 64))).int().tolist()
    for (_, i), (left, top, w, h), found in zip(rows, boxes, device(torch.tensor(rows)), strict=True):
        assert 0 <= left <= left + w <= 32
        assert 0 <= top <= top + h <= 32
        wanted = resize_tensor(device.images[i, :, top : top + h, left : left + w], (32, 32), "bilinear")
        assert (found.int() - wanted.int()).abs().max() <= 1


def test_colour_jitter_is_the_cpus() -> None:
    """With one order for both, drawn by the device."""
    device = made(Augment(scale=None, flip=0.0, color_jitter=0.5))

    class Draws:
        given = [torch.full((24, 3), 0.8), torch.tensor([0.5, 0.1, 0.9]).expand(24, 3)]  # factors, order 1, 0, 2

        def some(self, count: int) -> torch.Tensor:
            return self.given.pop(0)

    class Rng:
        def uniform(self, low: float, high: float, count: int) -> np.ndarray:
            return np.full(count, low + 0.8 * (high - low))

        def permutation(self, count: int) -> list[int]:
            return [1, 0, 2]

    found = device._jitter(device.images, Draws())
    for image, one in zip(device.images, found, strict=True):
        assert (color_jitter(image, 0.5, Rng()).int() - one.int()).abs().max() <= 1


@pytest.mark.parametrize("how", [STRONG, Augment(scale=None, pad=4, trivial=True, erase=0.3, erase_fill="noise")])
def test_an_image_does_not_depend_on_the_others(how: Augment) -> None:
    device = made(how)
    rows = [(epoch, i) for epoch in (0, 7) for i in range(24)]
    whole = device(torch.tensor(rows))
    assert torch.equal(torch.cat([device(torch.tensor([row])) for row in rows]), whole)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    assert torch.equal(device(torch.tensor([rows[i] for i in order])), whole[order])
    assert not torch.equal(whole[:24], whole[24:])  # another epoch
    assert not torch.equal(made(how, seed=1)(torch.tensor(rows)), whole)


def test_random_numbers_are_uniform_and_known() -> None:
    """The numbers of Java's and Python's SplitMix64, so that no platform draws others."""

    def mixed(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    gamma = 0x9E3779B97F4A7C15
    rows = [(0, 0), (3, 2), (10**6, 123_456_789)]
    for seed in (0, 5, 2**63 + 11):
        key = keys(seed, torch.tensor(rows))
        found = uniforms(key, 4, first=9)
        for (epoch, index), k, numbers in zip(rows, key.tolist(), found.tolist(), strict=True):
            wanted = mixed((mixed((seed * gamma + epoch) % 2**64) * gamma + index) % 2**64)
            assert k % 2**64 == wanted
            assert numbers == [(mixed((wanted + n * gamma) % 2**64) >> 41) * 2.0**-23 for n in range(10, 14)]
    many = uniforms(keys(1, torch.tensor([(e, i) for e in range(50) for i in range(50)])), 8)
    assert all(uniform(many[:, n].numpy(), 0, 1) for n in range(8))
    assert np.abs(np.corrcoef(many.numpy().T) - np.eye(8)).max() < 0.08


def test_boxes_flips_and_shifts_have_their_distributions() -> None:
    from vitkit.data.on_device import _Draws

    big = Pixels(np.zeros((1, 300, 300, 1), np.uint8), [0], ("a",))
    spec = InputSpec(size=(300, 300), mean=(0.5,), std=(0.5,), channels="gray")
    device = OnDevice(big, spec, Augment(scale=(0.1, 0.4), ratio=(0.5, 2.0)), 0, CPU)
    key = keys(0, torch.tensor([(epoch, 0) for epoch in range(4000)]))
    left, top, w, h = device._boxes(_Draws(uniforms(key, 64))).T.numpy()
    assert uniform(w * h / 9e4, 0.1, 0.4)
    assert uniform(np.log(w / h), math.log(0.5), math.log(2.0))
    assert uniform(left / (300 - w), 0, 1)
    assert uniform(top / (300 - h), 0, 1)

    ramp = Pixels(np.tile(np.arange(32, dtype=np.uint8), (1, 32, 1))[..., None] + 1, [0], ("a",))
    spec = InputSpec(size=(32, 32), mean=(0.5,), std=(0.5,), channels="gray")
    rows = torch.tensor([(epoch, 0) for epoch in range(1000)])
    x = OnDevice(ramp, spec, Augment(scale=None, flip=0.25), 0, CPU)(rows)
    assert abs((x[:, 0, 0, 0] == 32).float().mean() - 0.25) < 0.04
    shifted = OnDevice(ramp, spec, Augment(scale=None, flip=0.0, pad=2), 0, CPU)(rows)[:, 0, 16, 16].int() - 17
    assert sorted(shifted.unique().tolist()) == [-2, -1, 0, 1, 2]
    assert all(abs((shifted == by).float().mean() - 0.2) < 0.05 for by in range(-2, 3))


def test_erasing_fills_with_the_mean_or_with_noise() -> None:
    black = Pixels(np.zeros((1, 28, 28), np.uint8), [0], ("a",))
    rows = [(epoch, 0) for epoch in range(500)]
    for fill in ("mean", "noise"):
        how = Augment(scale=None, flip=0.0, erase=0.5, erase_area=(0.1, 0.3), erase_fill=fill)
        x = OnDevice(black, GRAY, how, 0, CPU)(torch.tensor(rows))
        erased = x.flatten(1).amax(1) > 0
        assert abs(erased.float().mean() - 0.5) < 0.08
        share = (x[erased] > 0).float().flatten(1).mean(1)
        if fill == "mean":
            assert x.unique().tolist() == [0, round(0.3 * 255)]
            assert 0.08 < share.min() < share.max() < 0.32
        else:  # a normal distribution, cut off below black
            assert abs(x[x > 0].float().median() - (0.3 + 0.4 * 0.347) * 255) < 6


def test_the_loader_gives_the_same_batches_from_any_step_and_to_any_number_of_processes() -> None:
    images = Subset(source(), range(4, 24))
    how = {"batch_size": 7, "seed": 3, "mix": Mix(cutmix=1.0, mixup=0.3, probability=0.7), "augment_on": "device"}
    whole = list(TrainLoader(images, SPEC, STRONG, **how).batches(0, 6))
    again = list(TrainLoader(images, SPEC, STRONG, **how).batches(3, 6))
    parts = [list(TrainLoader(images, SPEC, STRONG, rank=r, ranks=2, **how).batches(0, 6)) for r in range(2)]
    on_cpu = list(TrainLoader(images, SPEC, STRONG, workers=0, **{**how, "augment_on": "cpu"}).batches(0, 6))
    for step, batch in enumerate(whole):
        if step >= 3:
            assert torch.equal(batch.pixels, again[step - 3].pixels)
        assert torch.equal(batch.pixels, torch.cat([part[step].pixels for part in parts]))
        assert torch.equal(batch.index, on_cpu[step].index)
        assert torch.equal(batch.others, on_cpu[step].others)


def test_what_the_device_does_not_compute_is_refused_in_one_sentence() -> None:
    from vitkit.data.base import Source

    class Files(Source):
        def raw(self, i: int) -> bytes:
            raise AssertionError

    def refused(images: Source, spec: InputSpec, how: Augment, match: str) -> None:
        with pytest.raises(ConfigError, match=f"Augmentation on the device needs {match}.* Use --augment-on cpu"):
            OnDevice(images, spec, how, 0, CPU)

    refused(Files([0], ("a",)), SPEC, Augment(), "images of one size in memory")
    refused(source(1), SPEC, Augment(), "images with the model's 3 channels; these have 1")
    refused(source(), SPEC, Augment(interpolation="bicubic"), "bilinear interpolation; this recipe has bicubic")
    refused(source(side=40), SPEC, Augment(), "images no larger than the model's 32 x 32 pixels; these have 40 x 40")
    refused(source(side=28), SPEC, Augment(scale=None), "images of the model's 32 x 32 pixels where no crop is resized")
    with pytest.raises(ConfigError, match="Augmentation on the device needs a CUDA device or the CPU; got mps"):
        OnDevice(source(), SPEC, Augment(), 0, torch.device("mps"))
    with pytest.raises(ConfigError, match="augment_on must be one of cpu, device; got 'gpu'"):
        TrainLoader(source(), SPEC, augment_on="gpu")


def test_trivial_augment_draws_every_operation_with_its_strengths() -> None:
    image, seen = picture(1, (32, 32)), []
    rng = np.random.default_rng(0)
    for _ in range(300):
        out = trivial_augment(image, rng)
        assert out.size == (32, 32)
        seen.append(np.array(out).tobytes())
    assert seen.count(np.array(image).tobytes()) < 90  # identity, and operations that change nothing
    assert set(TRIVIAL) - {"identity"} <= set(OPERATIONS)
    with pytest.raises(ConfigError, match="Expected trivial or rand_layers; got both, with 2 layers"):
        Augment(trivial=True, rand_layers=2)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_whole_batch_on_the_device_is_what_the_single_steps_make(ranks: int) -> None:
    """Mixed by one formula for every step, in any number of processes; `mix.apply` is the definition."""
    how, mix, data = Augment(scale=None, pad=2), Mix(mixup=0.4, cutmix=1.0, probability=0.8), source()
    augment, kinds = OnDevice(data, SPEC, how, 5, CPU), set()
    for step in range(12):
        batch = Order(len(data), 8, seed=5).array(step)[plan(mix, 5, step, 8).order]
        z = normalize(augment(torch.from_numpy(batch)), SPEC)
        there = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])
        wanted, weight = apply(z, z[there], plan(mix, 5, step, 8))
        kinds.add((weight == 1.0, plan(mix, 5, step, 8).box is None))
        labels = torch.from_numpy(data.labels)[torch.from_numpy(batch[:, 1])]
        loaders = [
            TrainLoader(data, SPEC, how, batch_size=8, seed=5, mix=mix, augment_on="device", rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
        found = [next(loader.batches(step, step + 1)) for loader in loaders]
        assert torch.equal(torch.cat([part.pixels for part in found]), wanted)
        assert torch.equal(torch.cat([part.labels for part in found]), labels)
        assert torch.equal(torch.cat([part.index for part in found]), torch.from_numpy(batch[:, 1]))
        assert torch.equal(torch.cat([part.weight for part in found]), torch.full((8,), weight))
        if weight != 1.0:
            assert torch.equal(torch.cat([part.others for part in found]), labels[there])
    assert kinds == {(True, True), (False, True), (False, False)}
