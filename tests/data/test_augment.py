from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from tests.data.images import encoded, picture
from vitkit.data import Augment, Mix, augment, sample_rngs
from vitkit.data import mix as mixing
from vitkit.data.augment import augment_many, color_jitter, draw_rectangle, random_box, random_erase, takes_many
from vitkit.data.randaugment import OPERATIONS, blend_gray, brightness, contrast, rand_augment
from vitkit.errors import ConfigError
from vitkit.model.config import InputSpec

SPEC = InputSpec(size=(48, 40))


def generator(seed=0):
    return np.random.default_rng(seed)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 10**6))
@settings(deadline=None, max_examples=200)
def test_boxes_lie_inside(width, height, seed):
    left, top, right, bottom = random_box(width, height, (0.08, 1.0), (3 / 4, 4 / 3), generator(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_boxes_have_the_asked_area_and_shape():
    rng_ = generator(1)
    boxes = np.array([random_box(600, 500, (0.2, 0.6), (0.8, 1.25), rng_) for _ in range(2000)])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area = w * h / (600 * 500)
    assert 0.195 < area.min() < 0.22
    assert 0.58 < area.max() < 0.605
    assert abs(area.mean() - 0.4) < 0.02
    assert (w / h).min() > 0.79
    assert (w / h).max() < 1.26


def uniform(values, low, high):
    """Whether values look drawn uniformly from low..high: their deciles are, within 5 % of the range."""
    deciles = np.quantile(values, np.linspace(0, 1, 11))
    return np.abs((deciles - low) / (high - low) - np.linspace(0, 1, 11)).max() < 0.05


def test_area_is_uniform_and_the_logarithm_of_the_aspect_ratio_too():
    draw = generator(2)
    boxes = np.array([random_box(2000, 2000, (0.1, 0.4), (0.5, 2.0), draw) for _ in range(4000)])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert uniform(w * h / 4e6, 0.1, 0.4)
    assert uniform(np.log(w / h), np.log(0.5), np.log(2.0))
    assert uniform(boxes[:, 0] / (2000 - w), 0, 1)
    assert uniform(boxes[:, 1] / (2000 - h), 0, 1)


@pytest.mark.parametrize(
    ("width", "height", "box"), [(1000, 10, (493, 0, 506, 10)), (10, 1000, (0, 493, 10, 506)), (80, 81, (0, 0, 80, 81))]
)
def test_a_box_that_never_fits_becomes_the_largest_centred_one(width, height, box):
    class Huge:
        """A generator whose crops are larger than any image."""

        def uniform(self, low, high):
            return 1e4 if low == 0.08 else 0.0

    assert random_box(width, height, (0.08, 1.0), (3 / 4, 4 / 3), Huge()) == box


def test_defaults_are_the_usual_ones():
    how, mix = Augment(), Mix()
    assert (how.scale, how.ratio, how.flip) == ((0.08, 1.0), (0.75, 4 / 3), 0.5)
    assert (how.color_jitter, how.rand_layers, how.rand_magnitude, how.interpolation) == (0, 0, 10, None)
    assert (how.erase, how.erase_area, how.erase_fill) == (0, (0.02, 1 / 3), "mean")
    assert (mix.mixup, mix.cutmix, mix.probability, mix.switch) == (0, 0, 1, 0.5)


def expected(name, image, m, sign):
    """The authors' operation at strength m (10 is full scale), written out with Pillow and NumPy."""
    levels, side = np.asarray(image).astype(float), 224
    affine = {
        "shear_x": (1, sign * 0.3 * m / 10, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, sign * 0.3 * m / 10, 1, 0),
        "translate_x": (1, 0, sign * 100 * m / 10, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, sign * 100 * m / 10),
    }
    if name == "rotate":
        return image.rotate(sign * 30 * m / 10, Image.Resampling.BILINEAR, fillcolor=(128, 128, 128))
    if name in affine:
        return image.transform(
            (side, side), Image.Transform.AFFINE, affine[name], Image.Resampling.BILINEAR, fillcolor=(128, 128, 128)
        )
    if name in ("color", "contrast", "brightness", "sharpness"):
        return getattr(ImageEnhance, name.capitalize())(image).enhance(1.8 * m / 10 + 0.1)
    threshold = 256 * m // 10
    return Image.fromarray(
        {
            "posterize": lambda: np.asarray(image) & {5: 0b11000000, 10: 0b11110000}[m],
            "solarize": lambda: np.where(levels < threshold, levels, 255 - levels),
            "solarize_add": lambda: np.where(levels < 128, (levels + 110 * m // 10).clip(0, 255), levels),
            "invert": lambda: 255 - levels,
        }[name]().astype(np.uint8)
    )


@pytest.mark.parametrize("m", [5, 10])
@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"autocontrast", "equalize", "cutout"}))
def test_the_strength_of_every_operation_is_the_authors(name, m):
    image = picture(4, (224, 224))
    got = {OPERATIONS[name](image, m, generator(seed)).tobytes() for seed in range(12)}
    wanted = {expected(name, image, m, sign).tobytes() for sign in (1, -1)}
    if name in ("color", "contrast", "brightness", "sharpness"):  # within a level of Pillow's rounding
        ours, theirs = (np.frombuffer(values.pop(), np.uint8).astype(int) for values in (got, wanted))
        assert not got
        assert np.abs(ours - theirs).max() <= 1
    else:
        assert got == wanted  # both signs, where there is one


def test_cutout_is_a_gray_square_of_80_pixels_at_full_strength():
    white = Image.new("RGB", (224, 224), (255, 255, 255))
    sides, centres = set(), []
    for seed in range(1500):
        hit = np.asarray(OPERATIONS["cutout"](white, 10, generator(seed)))[..., 0] == 128
        rows, columns = np.flatnonzero(hit.any(1)), np.flatnonzero(hit.any(0))
        if rows[0] > 0 and rows[-1] < 223 and columns[0] > 0 and columns[-1] < 223:
            sides |= {len(rows), len(columns)}
            centres.append((rows[0], columns[0]))
    assert sides == {80}
    assert uniform([row for row, _ in centres], 1, 143)
    assert uniform([column for _, column in centres], 1, 143)


def test_sixteen_operations_are_drawn_equally_often(monkeypatch):
    drawn = []
    for name in OPERATIONS:
        monkeypatch.setitem(OPERATIONS, name, lambda image, m, rng, name=name: drawn.append((name, m)) or image)
    draw = generator(0)
    for _ in range(1000):
        rand_augment(picture(0, (4, 4)), 2, 15, draw)
    assert len(drawn) == 2000
    assert {m for _, m in drawn} == {15}
    counts = Counter(name for name, _ in drawn)
    assert len(counts) == 16
    assert 85 < min(counts.values()) < max(counts.values()) < 165


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_operation_keeps_mode_and_size_and_is_a_function_of_its_generator(name, mode):
    image = picture(0, (50, 40)).convert(mode)
    before = image.tobytes()
    for m in (0, 5, 10, 15, 20):
        a, b = OPERATIONS[name](image, m, generator(m)), OPERATIONS[name](image, m, generator(m))
        assert (a.mode, a.size) == (mode, (50, 40))
        assert a.tobytes() == b.tobytes()
    assert image.tobytes() == before


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"posterize", "solarize"}))
def test_every_operation_does_something_at_full_strength(name):
    image = picture(0, (50, 40)).point(lambda v: v // 2 + 40)
    assert OPERATIONS[name](image, 10, generator(3)).tobytes() != image.tobytes()


@pytest.mark.parametrize("factor", [0.0, 0.3, 0.6, 1.0, 1.4, 2.0])
def test_colour_operations_are_pillows(factor):
    image = picture(4, (50, 40))
    for ours, theirs in (
        (brightness, ImageEnhance.Brightness),
        (contrast, ImageEnhance.Contrast),
        (blend_gray, ImageEnhance.Color),
    ):
        far = np.asarray(ours(image, factor)).astype(int) - np.asarray(theirs(image).enhance(factor))
        assert np.abs(far).max() <= 1


def test_turning_and_shifting_fill_with_gray():
    white = Image.new("RGB", (64, 64), (255, 255, 255))
    for name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y", "cutout"):
        colours = {c for _, c in OPERATIONS[name](white, 10, generator(0)).getcolors(10**6)}
        assert (128, 128, 128) in colours, name
    moved = np.asarray(OPERATIONS["translate_x"](white, 10, generator(0)))[..., 0]
    assert (moved == 128).mean() == pytest.approx(100 / 224, abs=0.03)


def test_jitter_and_rand_augment_vary_with_the_generator():
    image = picture(0, (50, 40))
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert len({color_jitter(x, 0.4, generator(s)).numpy().tobytes() for s in range(8)}) == 8
    assert len({rand_augment(image, 2, 10, generator(s)).tobytes() for s in range(20)}) > 12
    assert rand_augment(image, 0, 10, generator(0)) is image


def test_jitter_factors_are_uniform_around_one():
    gray, colour = torch.full((3, 8, 8), 100, dtype=torch.uint8), torch.full((3, 8, 8), 100, dtype=torch.uint8)
    stripes = gray.clone()
    stripes[:, :, ::2], colour[0] = 140, 140
    draw = generator(0)
    flat, striped, red = ([color_jitter(x, 0.4, draw).float() for _ in range(1500)] for x in (gray, stripes, colour))
    assert uniform([x.mean().item() for x in flat], 60, 140)  # only brightness changes a flat gray
    assert uniform([(3 * (x.max() - x.min()) / x.mean()).item() for x in striped], 0.6, 1.4)  # contrast
    spread = [((x[0] - x[1]) / (x[0] * 0.299 + x[1] * 0.701)).mean().item() for x in red]  # contrast and saturation
    both = np.quantile(np.array(spread) / (40 / 111.96), [0, 0.5, 1])
    assert both == pytest.approx([0.36, 1 - 0.4**2 / 6, 1.96], abs=0.12)


def test_erasing_paints_one_rectangle_of_the_asked_area():
    x = torch.full((3, 60, 80), 255, dtype=torch.uint8)
    spec = InputSpec(size=(60, 80), mean=(0.2, 0.4, 0.6), std=(0.1, 0.1, 0.1))
    for seed in range(50):
        out = random_erase(x, spec, Augment(erase_area=(0.1, 0.2)), generator(seed))
        hit = (out != 255).any(0)
        rows, columns = hit.any(1).sum().item(), hit.any(0).sum().item()
        assert hit.sum() == rows * columns
        assert 0.09 < rows * columns / 4800 < 0.21
        assert out[:, hit].T.unique(dim=0).tolist() == [[51, 102, 153]]
    noise = random_erase(x, spec, Augment(erase_area=(0.2, 0.2), erase_fill="noise"), generator(0))
    assert noise[:, (noise != 255).any(0)].float().mean(1).tolist() == pytest.approx([51, 102, 153], abs=6)
    assert (x == 255).all()


def test_erased_rectangles_have_uniform_areas_and_log_uniform_shapes():
    spec, how = InputSpec(size=(1000, 1000)), Augment(erase_area=(0.02, 0.2))
    draw = generator(0)
    fills = [draw_rectangle(spec, how, draw)[2].shape[1:] for _ in range(3000)]
    h, w = np.array(fills).T
    assert uniform(h * w / 1e6, 0.02, 0.2)
    assert uniform(np.log(h / w), np.log(0.3), np.log(1 / 0.3))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "how",
    [
        Augment(erase=0.5),
        Augment(scale=(0.5, 1.0), erase=1.0, erase_fill="noise"),
        Augment(interpolation="nearest", flip=0.0),
        Augment(interpolation="bicubic", flip=1.0),
    ],
)
def test_many_at_a_time_are_the_same_bytes(channels, how):
    draw = generator(5)
    images = [draw.integers(0, 256, (28, 24, channels), dtype=np.uint8) for _ in range(60)]
    spec = InputSpec(
        size=(28, 26), channels="gray" if channels == 1 else "rgb", mean=(0.3,) * channels, std=(0.2,) * channels
    )
    assert takes_many(how, spec, images)
    many = augment_many(images, spec, how, [generator(seed) for seed in range(60)])
    for seed, image in enumerate(images):
        assert torch.equal(many[seed], augment(image, spec, how, generator(seed)))


def test_what_cannot_be_done_to_many_is_not():
    small = [np.zeros((8, 8, 1), dtype=np.uint8)]
    gray = InputSpec(size=(8, 8), channels="gray", mean=(0.5,), std=(0.5,))
    assert takes_many(Augment(), gray, small)
    assert not takes_many(Augment(color_jitter=0.1), gray, small)
    assert not takes_many(Augment(rand_layers=1), gray, small)
    assert not takes_many(Augment(scale=None), gray, small)
    assert not takes_many(Augment(), InputSpec(size=(8, 8)), small)
    assert not takes_many(Augment(), gray, [b"bytes"])


def test_probabilities_are_kept():
    data = encoded(picture(0))
    flips = [augment(data, SPEC, Augment(scale=None, flip=0.3), generator(s)) for s in range(300)]
    plain = augment(data, SPEC, Augment(scale=None, flip=0.0), generator(0))
    assert 0.22 < np.mean([torch.equal(x, plain.flip(2)) for x in flips]) < 0.38
    assert all(torch.equal(x, plain) or torch.equal(x, plain.flip(2)) for x in flips)
    erased = [augment(data, SPEC, Augment(scale=None, flip=0.0, erase=0.3), generator(s)) for s in range(300)]
    assert 0.22 < np.mean([not torch.equal(x, plain) for x in erased]) < 0.38


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("interpolation", [None, "nearest", "bicubic"])
def test_every_format_gives_the_asked_size(kind, interpolation):
    x = augment(encoded(picture(0), kind), SPEC, Augment(interpolation=interpolation), generator(0))
    assert x.shape == (3, 48, 40)
    assert x.dtype == torch.uint8


def test_a_turned_photo_is_cut_upright():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.new("RGB", (100, 60), (255, 0, 0))
    image.paste((0, 0, 255), (0, 0, 50, 60))  # left blue, right red: upright, the top is blue
    how = Augment(scale=(1.0, 1.0), ratio=(0.6, 0.6), flip=0.0)
    x = augment(encoded(image, exif=exif.tobytes()), InputSpec(size=(50, 30)), how, generator(0))
    assert x[2, 5].float().mean() > 200
    assert x[0, -5].float().mean() > 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"flip": 2},
        {"scale": (0.5, 0.1)},
        {"scale": (0, 1)},
        {"ratio": (2, 1)},
        {"erase_fill": "black"},
        {"rand_layers": -1},
        {"interpolation": "lanczos"},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ConfigError):
        Augment(**wrong)


@given(st.integers(2, 65), st.integers(0, 1000), st.integers(0, 50))
@settings(deadline=None, max_examples=60)
def test_partners_are_couples(count, seed, step):
    plan = mixing.plan(Mix(mixup=0.5, cutmix=1.0), seed, step, count)
    assert sorted(plan.order) == list(range(count))
    assert 0 <= plan.weight <= 1
    partners = mixing.partners(np.arange(count), count).tolist()
    assert all(partners[i] != i for i in range(count))
    assert all(partners[partners[i]] == i for i in range(count - count % 2))
    assert plan == mixing.plan(Mix(mixup=0.5, cutmix=1.0), seed, step, count)


def test_couples_change_from_step_to_step():
    orders = {tuple(mixing.plan(Mix(mixup=0.5), 0, step, 8).order) for step in range(20)}
    assert len(orders) == 20


def test_cutmix_weight_is_the_area_that_is_left():
    x, other = torch.zeros(3, 1, 37, 41), torch.ones(3, 1, 37, 41)
    for step in range(40):
        plan = mixing.plan(Mix(cutmix=1.0), 3, step, 4)
        out, weight = mixing.apply(x, other, plan)
        assert out.mean().item() == pytest.approx(1 - weight, abs=1e-6)
    assert x.sum() == 0


def test_mixing_distributions():
    plans = [mixing.plan(Mix(mixup=0.4, cutmix=1.0, probability=0.6, switch=0.25), 1, s, 4) for s in range(2000)]
    mixed = [p for p in plans if p.weight != 1.0 or p.box]
    assert len(mixed) / 2000 == pytest.approx(0.6, abs=0.04)
    assert np.mean([p.box is not None for p in mixed]) == pytest.approx(0.25, abs=0.04)
    lam = [p.weight for p in mixed if p.box is None]
    assert np.mean(lam) == pytest.approx(0.5, abs=0.04)
    assert np.var(lam) == pytest.approx(0.25 / (2 * 0.4 + 1), abs=0.02)


def test_cutmix_takes_a_box_of_uniform_area_at_a_uniform_centre():
    boxes = np.array([mixing.plan(Mix(cutmix=1.0), 0, step, 4).box for step in range(3000)])
    top, left, bottom, right = boxes.T
    assert ((bottom - top) * (right - left)).mean() == pytest.approx(1 / 2 - 1 / 5 + 1 / 48, abs=0.015)
    inside = (top > 0) & (left > 0) & (bottom < 1) & (right < 1)
    assert np.allclose((bottom - top)[inside], (right - left)[inside])
    assert (top == 0).mean() == pytest.approx((bottom == 1).mean(), abs=0.04)
    assert (left == 0).mean() == pytest.approx(1 / 3, abs=0.03)  # a side is 2/3 on average, half of it too near


def test_soft_targets():
    y = mixing.soft_targets(torch.tensor([0, 1]), torch.tensor([2, 1]), torch.tensor([0.75, 0.5]), 4, 0.2)
    assert torch.allclose(y, torch.tensor([[0.65, 0.05, 0.25, 0.05], [0.05, 0.85, 0.05, 0.05]]))


def test_one_image_cannot_be_mixed():
    with pytest.raises(ConfigError, match="at least 2 images"):
        mixing.plan(Mix(mixup=1.0), 0, 0, 1)
    assert mixing.plan(Mix(), 0, 0, 1).weight == 1.0


def test_the_generator_is_the_only_randomness():
    data = encoded(picture(0))
    how = Augment(color_jitter=0.3, rand_layers=3, erase=1.0)
    draws = []
    for s in (1, 2):
        np.random.seed(s)
        torch.manual_seed(s)
        draws.append(augment(data, SPEC, how, next(sample_rngs(0, [(4, 2)]))))
    assert torch.equal(*draws)


def test_jitter_is_the_three_operations_one_after_the_other():
    class Fixed:
        """A generator that draws what it is told."""

        def __init__(self, factors, order):
            self.factors, self.order = np.array(factors), order

        def uniform(self, low, high, count):
            return self.factors

        def permutation(self, count):
            return self.order

    image = picture(4, (50, 40))
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        expected = image
        for which in order:
            expected = (brightness, contrast, blend_gray)[which](expected, (0.7, 1.3, 0.6)[which])
        got = color_jitter(x, 0.4, Fixed((0.7, 1.3, 0.6), order)).permute(1, 2, 0).numpy()
        assert np.abs(got.astype(int) - np.asarray(expected)).max() <= 3  # Pillow cuts off after every operation
    gray = color_jitter(x[:1], 0.4, Fixed((0.7, 1.0, 0.6), [2, 0, 1]))
    assert torch.equal(gray, (x[:1] * 0.7).round().to(torch.uint8))
