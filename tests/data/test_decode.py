from __future__ import annotations

import contextlib
import importlib
import io
import os
import re

import numpy as np
import pytest
from PIL import Image

from tests.data.images import BAD, encoded, odd_files, picture, png_header
from vitkit.data.decode import decode, formats, region, to_channels
from vitkit.data.files import FORMATS
from vitkit.errors import BadImage

room = importlib.import_module("vitkit.data.decode")  # the package has a function of that name
FILES = odd_files()
REASONS = {
    "truncated.jpg": "truncated: the file is incomplete; copy it again from where it came from",
    "truncated.png": "truncated: the file is incomplete; copy it again from where it came from",
    "empty.jpg": "0 bytes",
    "text.jpg": "not an image",
    "bomb.png": "megapixels",
}


@pytest.fixture(params=["with simplejpeg", "without"])
def accelerator(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setattr(room, "simplejpeg", None)
    elif room.simplejpeg is None:
        pytest.skip("simplejpeg is not installed")


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_cannot_be_read_is_named_with_its_reason(name, accelerator):
    with pytest.raises(BadImage, match=rf"^{name}: .*{REASONS[name]}"):
        decode(FILES[name], name)


@pytest.mark.parametrize("name", sorted(set(FILES) - BAD))
def test_everything_else_becomes_rgb(name, accelerator):
    image = to_channels(decode(FILES[name], name), "rgb", 3)
    assert image.mode == "RGB"
    assert np.asarray(image).std() > 1


def test_exif_orientation_is_applied(accelerator):
    upright = decode(FILES["good.jpg"])
    turned = decode(FILES["rotated.jpg"])
    assert turned.size == upright.size[::-1]
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(upright), -1))


@pytest.mark.parametrize("tag", range(1, 9))
def test_every_orientation_agrees_with_pillow(tag):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = tag
    data = encoded(picture(3), exif=exif.tobytes())
    assert np.array_equal(np.asarray(decode(data)), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))))


def test_sixteen_bits_are_scaled_not_clipped():
    levels = np.array([[0, 257, 32896, 65535]], np.uint16)
    assert np.asarray(decode(encoded(Image.fromarray(levels), "PNG"))).tolist() == [[0, 1, 128, 255]]


def test_floating_point_between_0_and_1_is_scaled_and_other_values_are_refused():
    good = Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32))
    assert np.asarray(decode(encoded(good, "TIFF"))).tolist() == [[0, 128, 255]]
    with pytest.raises(BadImage, match="values from 0 to 2000"):
        decode(encoded(Image.fromarray(np.array([[0.0, 2000.0]], np.float32)), "TIFF"))
    for broken in (np.nan, np.inf):
        with pytest.raises(BadImage, match=r"^photo\.tif: mode F has NaN or infinite values"):
            decode(encoded(Image.fromarray(np.array([[0.5, broken]], np.float32)), "TIFF"), "photo.tif")


def test_alpha_is_dropped_as_timm_drops_it():
    image = picture(1).convert("RGBA")
    image.putalpha(7)
    assert np.array_equal(np.asarray(to_channels(decode(encoded(image, "PNG")), "rgb", 3)), np.asarray(picture(1)))


def test_palette_with_transparency_keeps_its_colours():
    palette = picture(2).quantize(16)
    data = encoded(palette, "PNG", transparency=bytes(range(16)))
    assert np.array_equal(np.asarray(to_channels(decode(data), "rgb", 3)), np.asarray(palette.convert("RGB")))


def test_the_largest_image_is_pillows():
    assert room.MAX_PIXELS == 178_956_970 == 2 * Image.MAX_IMAGE_PIXELS
    with pytest.raises(BadImage, match=r"^x\.png: declares (13378 x 13378 pixels, )?more than 178 megapixels"):
        decode(png_header(13378, 13378), "x.png")
    with pytest.raises(BadImage, match=r"^x\.png: (?!declares)"):  # read, and then found to hold no pixels
        decode(png_header(13377, 13377), "x.png")


@pytest.mark.parametrize(("side", "factor"), [(1599, 1), (1600, 2), (3200, 4), (6400, 8)])
def test_a_photo_is_decoded_at_the_smallest_size_that_is_large_enough(side, factor, accelerator):
    data = encoded(Image.new("RGB", (side, 824), (90, 120, 30)))
    assert region(data, "x", (0, 0, side, 824), (103, 800), "rgb", 3).shape[1] == side // factor


def test_raw_channels_are_counted():
    image = decode(encoded(picture(1).convert("RGBA"), "PNG"))
    assert to_channels(image, "raw", 4).mode == "RGBA"
    with pytest.raises(BadImage, match=r"x\.png: has 4 channels \(RGBA\), but the model takes 2"):
        to_channels(image, "raw", 2, "x.png")


def test_the_accelerator_changes_no_pixel(shared_data, monkeypatch):
    if room.simplejpeg is None:
        pytest.skip("simplejpeg is not installed")
    files = sorted((shared_data / "pizza_steak_sushi/test").glob("*/*.jpg"))[::6]
    big = encoded(Image.open(files[0]).convert("RGB").resize((1601, 1203)))
    box = (13, 51, 1500, 1190)
    fast = [np.asarray(decode(f.read_bytes())) for f in files]
    fast_cut = region(big, "big", box, (224, 224), "rgb", 3)
    monkeypatch.setattr(room, "simplejpeg", None)
    assert all(np.array_equal(a, np.asarray(decode(f.read_bytes()))) for a, f in zip(fast, files, strict=True))
    assert np.array_equal(fast_cut, region(big, "big", box, (224, 224), "rgb", 3))
    assert fast_cut.shape[0] < 1139 / 3  # it was decoded at a quarter


@pytest.mark.parametrize("size", [(2000, 1500), (1999, 1501), (640, 480)])
def test_scaled_decoding_shows_the_same_region(size, accelerator):
    image = picture(5, size)
    box = (size[0] // 5, size[1] // 4, size[0] * 4 // 5, size[1] - 3)
    small = region(encoded(image), "x", box, (100, 100), "rgb", 3)
    assert min(small.shape[:2]) >= 100
    wanted = image.crop(box).resize((100, 100), Image.Resampling.BOX)
    got = Image.fromarray(np.ascontiguousarray(small)).resize((100, 100), Image.Resampling.BOX)
    assert np.abs(np.asarray(wanted).astype(int) - np.asarray(got)).mean() < 3


def test_scaled_decoding_names_a_truncated_file(accelerator):
    data = encoded(picture(5, (2000, 1500)))[:40_000]
    with pytest.raises(BadImage, match=r"^cut\.jpg: truncated"):
        region(data, "cut.jpg", (0, 0, 2000, 1500), (100, 100), "rgb", 3)


def test_bytes_of_no_image_never_escape_as_another_error():
    rng = np.random.default_rng(0)
    start = FILES["good.jpg"]
    refused: list[str] = []
    for n in range(40):
        broken = bytearray(start)
        for at in rng.integers(0, len(broken), 30):
            broken[at] = int(rng.integers(0, 256))
        try:
            decode(bytes(broken[: int(rng.integers(1, len(broken)))]), f"{n}.jpg")
        except BadImage as error:
            refused.append(str(error))
    assert len(refused) >= 20  # cut short as they are, most cannot be decoded
    assert all(re.match(r"\d+\.jpg: ", said) for said in refused)


@pytest.mark.parametrize("tag", range(1, 9))
@pytest.mark.parametrize("channels", ["rgb", "gray"])
def test_a_region_of_a_turned_photo_is_a_region_of_the_upright_one(tag, channels, accelerator):
    exif = Image.Exif()
    exif[0x0112] = tag
    data = encoded(picture(3, (400, 304)), exif=exif.tobytes())
    upright = to_channels(decode(data), channels, 3)
    count = len(upright.getbands())
    box = (16, 32, upright.width - 64, upright.height - 48)
    expected = np.asarray(upright.crop(box)).reshape(box[3] - box[1], box[2] - box[0], count)
    assert np.array_equal(region(data, "x", box, (200, 200), channels, count), expected)
    half = region(data, "x", box, (100, 90), channels, count)
    assert half.shape == (expected.shape[0] // 2, expected.shape[1] // 2, count)
    reduced = expected.reshape(half.shape[0], 2, half.shape[1], 2, count).mean((1, 3))
    assert np.abs(reduced - half).mean() < 4


def test_other_formats_are_refused_whatever_their_name(tmp_path, monkeypatch):
    """Pillow decodes an EPS file by starting Ghostscript."""
    ran = tmp_path / "ran"
    (tmp_path / "gs").write_text(f"#!/bin/sh\necho yes > {ran}\nexit 1\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for kind in ("EPS", "PCX", "SGI", "DDS", "PDF"):
        raw = encoded(picture(0, (9, 9)), kind)
        with pytest.raises(BadImage, match=r"^cat\.jpg: not an image in a format that vitkit reads \(JPEG, .*AVIF"):
            decode(raw, "cat.jpg")
    assert not ran.exists()


@pytest.mark.parametrize("kind", sorted(set(FORMATS) - {"MPO"}))
def test_every_format_of_the_table_is_read(kind):
    if kind not in formats():
        pytest.skip(f"this Pillow does not read {kind}")
    side = 16
    assert decode(encoded(picture(0, (side, side)), kind)).size == (side, side)


def test_libtiff_prints_nothing(capfd):
    """It is a C library, which prints to the terminal unless it is told not to."""
    raw = encoded(picture(0, (64, 64)), "TIFF", compression="tiff_lzw")
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(raw)
        for place in rng.integers(0, len(raw), 6):
            damaged[place] = rng.integers(256)
        with contextlib.suppress(BadImage):
            decode(bytes(damaged))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
