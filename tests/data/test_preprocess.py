"""Pixels against the libraries that the checkpoints were evaluated with, computed live."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.images import picture
from tests.peers import peer
from vitkit.checkpoints import preprocessing_presets
from vitkit.data import decode, normalize, pixels, preprocess
from vitkit.data.decode import to_channels
from vitkit.data.preprocess import FILTERS, resized
from vitkit.errors import ConfigError
from vitkit.model.config import InputSpec

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
TIMM = {
    "augreg 224": InputSpec(resize="crop", crop=0.9, interpolation="bicubic"),
    "augreg 384": InputSpec(size=(384, 384), resize="crop", crop=1.0, interpolation="bicubic"),
    "deit": InputSpec(resize="crop", crop=0.875, interpolation="bicubic", **IMAGENET),
    "deit bilinear": InputSpec(resize="crop", crop=0.9, interpolation="bilinear", **IMAGENET),
}


def images(shared_data: Path) -> list[Image.Image]:
    """Fifty real photos, among them grayscale, RGBA, and extreme portraits and landscapes."""
    files = [
        *sorted((shared_data / "imagenet_val_500").glob("*/*.jpg"))[::15],
        *sorted((shared_data / "pizza_steak_sushi/test").glob("*/*.jpg"))[::5],
    ][:44]
    found = [decode(f.read_bytes(), f.name) for f in files]
    found += [found[0].convert("L"), found[1].convert("RGBA"), found[2].convert("LA")]
    found += [found[3].resize((1000, 60)), found[4].resize((61, 900)), found[5].resize((225, 224))]
    assert len(found) == 50
    return found


@pytest.mark.parametrize("name", TIMM)
def test_bit_equal_to_timm(name, shared_data):
    spec = TIMM[name]
    transform = peer("timm.data").create_transform(
        spec.size[0],
        is_training=False,
        interpolation=spec.interpolation,
        crop_pct=spec.crop,
        mean=spec.mean,
        std=spec.std,
    )
    for number, image in enumerate(images(shared_data)):
        assert torch.equal(preprocess(image, spec), transform(image.convert("RGB"))), number


@pytest.mark.parametrize(
    "spec", [InputSpec(), InputSpec(size=(384, 384), interpolation="bicubic", **IMAGENET)], ids=["vit", "384 bicubic"]
)
def test_bit_equal_to_hugging_face_with_pillow(spec, shared_data):
    processor = peer("transformers.models.vit.image_processing_pil_vit").ViTImageProcessorPil(
        size={"height": spec.size[0], "width": spec.size[1]},
        image_mean=list(spec.mean),
        image_std=list(spec.std),
        resample=3 if spec.interpolation == "bicubic" else 2,
    )
    for number, image in enumerate(images(shared_data)):
        theirs = processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        assert torch.equal(preprocess(image, spec), theirs), number


def test_within_one_level_of_hugging_face_with_tensors(shared_data):
    processor = peer("transformers.models.vit.image_processing_vit").ViTImageProcessor()
    spec = InputSpec(backend="tensor")
    for number, image in enumerate(images(shared_data)):
        theirs = processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        far = (preprocess(image, spec) - theirs).abs().max().item() * 255 / 2  # std 0.5: a level is 2 / 255
        assert far < 1.01, number


@pytest.mark.parametrize(("size", "shape"), [((192, 128), (500, 300)), ((96, 160), (300, 500)), ((64, 96), (97, 99))])
def test_other_than_square_is_timm_too(size, shape):
    # bilinear: timm forgets to hand any other filter on to its resize of other than square sizes
    timm = peer("timm.data")
    spec = InputSpec(size=size, resize="crop", crop=0.9)
    transform = timm.create_transform(
        (3, *size), is_training=False, interpolation="bilinear", crop_pct=0.9, mean=spec.mean, std=spec.std
    )
    image = picture(1, shape)
    assert torch.equal(preprocess(image, spec), transform(image))


def test_the_statistics_of_imagenet():
    assert preprocessing_presets.IMAGENET == {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    assert preprocessing_presets.HALF == {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    white = preprocess(Image.new("RGB", (224, 224), (255, 255, 255)), InputSpec(**preprocessing_presets.IMAGENET))
    assert white[:, 0, 0].tolist() == pytest.approx([2.248908, 2.428571, 2.64], abs=1e-5)


@pytest.mark.parametrize(
    ("size", "crop", "shape", "expected"),
    [
        ((224, 224), 0.9, (400, 300), (330, 248)),  # 224 / 0.9 = 248.9 and 248 * 4 / 3 = 330.7 are rounded down
        ((224, 224), 0.9, (300, 400), (248, 330)),
        ((224, 224), 0.875, (256, 256), (256, 256)),
        ((100, 200), 0.9, (400, 300), (222, 166)),  # covers 111 x 222
    ],
)
def test_the_size_before_the_crop(size, crop, shape, expected):
    assert resized(*shape, InputSpec(size=size, resize="crop", crop=crop)) == expected


def test_gray_and_raw_channels():
    image = picture(0)
    gray = preprocess(image, InputSpec(size=(28, 28), channels="gray", mean=(0.5,), std=(0.5,)))
    assert gray.shape == (1, 28, 28)
    assert torch.equal(
        gray, preprocess(image.convert("L"), InputSpec(size=(28, 28), channels="gray", mean=(0.5,), std=(0.5,)))
    )
    four = InputSpec(size=(28, 28), channels="raw", mean=(0.5,) * 4, std=(0.5,) * 4)
    assert preprocess(image.convert("RGBA"), four)[3].unique().tolist() == [1.0]


def test_an_image_of_the_right_size_is_only_normalised():
    image = picture(0, (32, 32))
    expected = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - 0.5) / 0.5
    assert torch.equal(preprocess(image, InputSpec(size=(32, 32))), expected)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_both_backends_see_the_same_picture(interpolation):
    image = picture(3, (200, 150))
    spec = InputSpec(size=(64, 64), interpolation=interpolation)
    a = pixels(image, spec).int()
    b = pixels(image, InputSpec(size=(64, 64), interpolation=interpolation, backend="tensor")).int()
    assert (a - b).abs().max() <= (0 if interpolation == "nearest" else 2)


def test_lanczos_has_no_tensor_form():
    with pytest.raises(ConfigError, match=r"lanczos.*pillow"):
        preprocess(picture(), InputSpec(interpolation="lanczos", backend="tensor"))


def test_normalize_is_a_function_of_the_batch_row():
    x = torch.randint(0, 256, (5, 3, 8, 9), dtype=torch.uint8)
    spec = InputSpec(size=(8, 9), **IMAGENET)
    assert torch.equal(normalize(x, spec)[2], normalize(x[2:3], spec)[0])


def test_normalize_joins_parts_and_treats_each_image_as_if_alone():
    parts = [torch.randint(0, 256, (n, 3, 28, 28), dtype=torch.uint8) for n in (60, 1, 0, 33)]
    alone = torch.cat([normalize(image[None], InputSpec()) for part in parts for image in part])
    assert torch.equal(normalize(parts, InputSpec()), alone)


def test_conversion_leaves_a_fitting_image_alone():
    image = picture()
    assert to_channels(image, "rgb", 3) is image


@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.sampled_from(["nearest", "bilinear", "bicubic", "lanczos"]),
    st.sampled_from(["RGB", "L", "RGBA"]),
    st.sampled_from([1.0, 0.9, 0.5]),
)
@settings(deadline=None, max_examples=150)
def test_any_size_is_one_resize_and_one_crop_of_pillow(width, height, interpolation, mode, crop):
    count = len(Image.new(mode, (1, 1)).getbands())
    spec = InputSpec(
        size=(32, 32),
        resize="crop",
        crop=crop,
        interpolation=interpolation,
        mean=(0.5,) * count,
        std=(0.5,) * count,
        channels="raw",
    )
    array = np.random.default_rng(width).integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(array).convert(mode)
    w, h = resized(width, height, spec)
    left, top = round((w - 32) / 2), round((h - 32) / 2)
    expected = image.resize((w, h), FILTERS[interpolation]).crop((left, top, left + 32, top + 32))
    assert np.array_equal(pixels(image, spec).permute(1, 2, 0).numpy(), np.atleast_3d(np.asarray(expected)))
