"""Decoding on a GPU, with Pillow in nvJPEG's place: everything else runs on any machine."""

from __future__ import annotations

import functools
import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.images import class_folder, odd_files
from vitkit.data import EvalLoader, open_source
from vitkit.data.decode import digest
from vitkit.data.gpu import FILTERS, GpuPixels, nvjpeg, takes, weights
from vitkit.data.preprocess import cropped
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
    monkeypatch.setattr("vitkit.data.loader.GpuPixels", functools.partial(GpuPixels, decoder=stand_in))
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


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("resize", ["crop", "squash"])
def test_resizing_is_pillows(interpolation, resize):
    spec = InputSpec(size=(32, 40), resize=resize, crop=0.9 if resize == "crop" else 1.0, interpolation=interpolation)
    sizes = [(300, 200), (64, 48), (32, 32), (20, 30), (40, 36), (200, 301), (45, 36), (500, 60)]
    images = [noise(w, h, n) for n, (w, h) in enumerate(sizes)]
    gpu = GpuPixels(Images([jpeg(images[0])]), spec, CPU, stand_in)
    found = gpu.resize([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])
    for x, image in zip(found, images, strict=True):
        expected = torch.from_numpy(np.array(cropped(image, spec))).permute(2, 0, 1)
        difference = (x.int() - expected.int()).abs()
        assert difference.max() <= 1
        # Pillow adds integers; the ties of bilinear weights fall to either side here.
        assert (difference > 0).float().mean() < (0.05 if interpolation == "bilinear" else 0.002), image.size


def test_many_sizes_are_resized_in_parts(monkeypatch):
    monkeypatch.setattr("vitkit.data.gpu.AT_ONCE", 3 * 64 * 64 * 2)
    images = [torch.from_numpy(np.array(noise(40 + 5 * n, 90 - 5 * n, n))).permute(2, 0, 1) for n in range(9)]
    gpu = GpuPixels(Images([jpeg(noise(8, 8))]), SPEC, CPU, stand_in)
    assert torch.equal(gpu.resize(images), torch.cat([gpu.resize([image]) for image in images]))


def test_weights_of_an_axis_that_stays_are_the_identity():
    assert np.array_equal(weights(9, 9, 2, 4, "bicubic"), np.eye(9, dtype=np.float32)[2:6])


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_cpu(tmp_path, on_gpu, workers):
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
    (tmp_path / "odd" / "broken.jpg").write_bytes(broken())
    source = open_source(tmp_path, "all")
    how = {"batch_size": 9, "workers": workers, "bad_images": "skip", "hashed": True}
    there, here = on_gpu(source, SPEC, **how), EvalLoader(source, SPEC, **how)
    for one, other in zip(there, here, strict=True):
        assert torch.equal(one.index, other.index)
        assert torch.equal(one.labels, other.labels)
        assert np.array_equal(one.digests, [digest(source.raw(int(i))) for i in one.index])
        assert (one.pixels - other.pixels).abs().max() <= 1.001 / 255 / 0.5
    assert there.skipped == here.skipped
    assert "odd/broken.jpg" in there.skipped


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
