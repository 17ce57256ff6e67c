"""Decoding on a GPU, with Pillow in nvJPEG's place: everything else runs on any machine."""

from __future__ import annotations

import functools
import importlib
import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.images import class_folder, odd_files
from vitkit.data import EvalLoader, open_source
from vitkit.data.decode import digest
from vitkit.data.gpu import GpuPixels, nvjpeg, takes
from vitkit.data.resize import Resize
from vitkit.errors import BadImage, ConfigError, MissingDependency
from vitkit.evaluation.predict import Images
from vitkit.model.config import InputSpec

CPU = torch.device("cpu")
SPEC = InputSpec(size=(32, 32), resize="crop", crop=0.9, interpolation="bicubic")


def stand_in(files: list[torch.Tensor]) -> list[torch.Tensor]:
    """Decode like nvJPEG: RGB, not turned upright; one broken file spoils all."""
    found = []
    for file in files:
        image = Image.open(io.BytesIO(file.numpy().tobytes()))
        if b"refuse me" in file.numpy().tobytes():
            raise RuntimeError("nvjpegDecode failed")
        found.append(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1))
    return found


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr("vitkit.data.eval_loader.GpuPixels", functools.partial(GpuPixels, decoder=stand_in))
    return functools.partial(EvalLoader, decode="gpu")


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    rough = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    fine = np.random.default_rng(seed).integers(-30, 30, (height, width, 3))
    smooth = np.asarray(Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC), np.int64)
    return Image.fromarray((smooth + fine).clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image, **how) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95, **how)
    return file.getvalue()


def broken() -> bytes:
    """A JPEG with a Huffman table that no decoder takes."""
    file = bytearray(jpeg(noise(50, 60, 3), comment=b"refuse me"))
    table = file.index(b"\xff\xc4") + 5
    file[table : table + 16] = b"\xff" * 16
    return bytes(file)


@pytest.fixture
def odd(tmp_path):
    """A folder of all sorts of files, good and bad."""
    class_folder(tmp_path, {"good": 10})
    (tmp_path / "odd").mkdir()
    for name, data in odd_files().items():
        (tmp_path / "odd" / name).write_bytes(data)
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        (tmp_path / "odd" / f"turned-{turn}.jpg").write_bytes(jpeg(noise(80, 50, turn), exif=exif))
    (tmp_path / "odd" / "refused.jpg").write_bytes(jpeg(noise(90, 50, 1), comment=b"refuse me"))
    (tmp_path / "odd" / "large.jpg").write_bytes(jpeg(noise(600, 500, 2)))  # more bytes than its slot
    (tmp_path / "odd" / "high.jpg").write_bytes(jpeg(noise(40, 200, 3)))
    (tmp_path / "odd" / "gray.jpg").write_bytes(jpeg(noise(60, 50, 3).convert("L")))
    (tmp_path / "odd" / "broken.jpg").write_bytes(broken())
    return open_source(tmp_path, "all")


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_cpu(odd, on_gpu, workers):
    how = {"batch_size": 9, "workers": workers, "bad_images": "skip", "hashed": True}
    there, here = on_gpu(odd, SPEC, **how), EvalLoader(odd, SPEC, **how)
    for one, other in zip(there, here, strict=True):
        assert torch.equal(one.index, other.index)
        assert torch.equal(one.labels, other.labels)
        assert np.array_equal(one.digests, [digest(odd.raw(int(i))) for i in one.index])
        apart = (one.pixels - other.pixels).abs().amax((1, 2, 3))
        high = torch.tensor([odd.names[int(i)] == "odd/high.jpg" for i in one.index])
        assert not apart[~high].any()  # Pillow decodes on both sides, and the resize is Pillow's
        assert (apart[high] <= 3.001 / 255 / 0.5).all()  # Pillow 13 begins with the height, the GPU never does
    assert there.skipped == here.skipped
    assert "odd/broken.jpg" in there.skipped


GRAY = InputSpec(size=(32, 32), resize="crop", crop=0.9, mean=(0.5,), std=(0.5,), channels="gray")


@pytest.mark.parametrize("room", [20_000, 600_000])  # of which the first is too small for some images
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("spec", [SPEC, GRAY])
@pytest.mark.parametrize("turbo", [True, False])
def test_pixels_that_the_device_resizes_are_those_of_workers(odd, monkeypatch, spec, workers, room, turbo):
    how = {"batch_size": 9, "workers": workers, "bad_images": "skip", "hashed": True}
    here = EvalLoader(odd, spec, **how)
    expected = list(here)
    resized, whole = [], Resize.__call__

    def count(self, images, ready):
        resized.extend(ready)
        return whole(self, images, ready)

    monkeypatch.setattr("vitkit.data.gpu.ROOM", room)
    monkeypatch.setattr(EvalLoader, "_resizes_there", lambda self: True)
    monkeypatch.setattr(Resize, "__call__", count)
    if not turbo:
        monkeypatch.setattr(importlib.import_module("vitkit.data.decode"), "simplejpeg", None)
    there = EvalLoader(odd, spec, **how)
    for one, other in zip(there, expected, strict=True):
        assert torch.equal(one.index, other.index)
        assert torch.equal(one.labels, other.labels)
        assert np.array_equal(one.digests, other.digests)
        assert torch.equal(one.pixels, other.pixels)
    assert there.skipped == here.skipped
    assert resized.count(False) > 20  # the device resized these
    assert resized.count(True) > 0  # and workers resized those


def test_fail_names_what_nobody_can_decode(on_gpu):
    with pytest.raises(BadImage, match="image 1: "):
        list(on_gpu(Images([jpeg(noise(9, 9)), broken()]), SPEC, workers=0))


def test_which_files_are_for_the_gpu():
    image = noise(30, 20)
    assert takes(jpeg(image), "a") == 1
    assert takes(jpeg(image) + b"\0\0", "a") == 1
    assert takes(jpeg(image)[:-40], "a") == 0  # ends early
    assert takes(jpeg(image.convert("L")), "a") == takes(jpeg(image.convert("CMYK")), "a") == 0
    file = io.BytesIO()
    image.save(file, "PNG")
    assert takes(file.getvalue(), "a") == 0


def test_what_does_not_suit_is_refused_in_one_sentence(monkeypatch):
    source = Images([jpeg(noise(9, 9))])
    with pytest.raises(ConfigError, match=r"needs CUDA; the device is cpu\. Use --decode cpu"):
        EvalLoader(source, SPEC, decode="gpu")
    with pytest.raises(ConfigError, match="the model expects rgb, pillow and nearest"):
        GpuPixels(source, InputSpec(interpolation="nearest"), CPU, stand_in)
    with pytest.raises(ConfigError, match="decode must be one of cpu, gpu; got 'tpu'"):
        EvalLoader(source, SPEC, decode="tpu")
    for name in ("torchvision", "torchvision.io"):  # another test may have imported them
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match="needs a torchvision that fits torch"):
        nvjpeg(CPU)
