"""Every image exactly once, whoever asks and on however many processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit import InputSpec, ViT, ViTConfig
from vitkit.data.base import Pixels
from vitkit.data.preprocess import preprocess
from vitkit.errors import BadImage, DataError, InputError
from vitkit.evaluation import logits_of
from vitkit.evaluation.predict import Images
from vitkit.model.classifier import Classifier, device_of
from vitkit.runtime import Runtime
from vitkit.speed.fused import Fused

CONFIG = ViTConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=32,
    patch_size=8,
    num_classes=3,
    hidden_dropout_prob=0.5,
)


def pixels(n: int) -> Pixels:
    rng = np.random.default_rng(0)
    return Pixels(rng.integers(0, 256, (n, 40, 30, 3)), rng.integers(0, 3, n), ["a", "b", "c"])


@pytest.fixture
def model() -> ViT:
    return ViT(CONFIG)


def test_close_logits_stay_apart_in_16_bits(model) -> None:
    """Two classes whose logits differ by a thousandth, near 8: bf16 has steps of 1/32 there and calls them equal."""
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([8.0, 8.001, 0.0])
    runtime = Runtime("cpu", "bf16")
    assert (logits_of(model, pixels(5), runtime=runtime).logits.argmax(1) == 1).all()
    assert (Fused(model.eval(), torch.bfloat16)(torch.zeros(2, 3, 32, 32)).argmax(1) == 1).all()


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_each_image_once_in_order(model, batch_size) -> None:
    source, seen = pixels(11), []
    model.train()
    found = logits_of(model, source, batch_size=batch_size, progress=seen.append)
    assert model.training  # it leaves as it came, and dropout was off inside
    assert sum(seen) == len(found) == 11
    model.eval()
    with torch.no_grad():
        for i in range(11):
            x = preprocess(source.read(i)[0], model.input_spec)[None]
            assert np.allclose(model(x).numpy()[0], found.logits[i], atol=1e-5)
    assert (found.labels == source.labels).all()
    assert found.names == tuple(source.names)
    assert found.logits.dtype == np.float32


def test_any_classifier_will_do() -> None:
    class Mean:
        input_spec = InputSpec(size=(8, 8), class_names=("dark", "light"))

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            mean = x.mean((1, 2, 3))
            return torch.stack([-mean, mean], 1)

    assert isinstance(Mean(), Classifier)
    assert isinstance(ViT(CONFIG), Classifier)
    assert device_of(Mean()) == torch.device("cpu")
    source = Pixels(np.stack([np.zeros((9, 9, 3)), np.full((9, 9, 3), 255)]), [0, 1], ["dark", "light"])
    assert logits_of(Mean(), source).logits.argmax(1).tolist() == [0, 1]


def test_bad_images_fail_or_are_named(model, tmp_path) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    source = Images(tmp_path)
    with pytest.raises(BadImage, match=r"bad\.png"):
        logits_of(model, source)
    found = logits_of(model, source, bad_images="skip")
    assert [os.path.basename(name) for name in found.names] == ["good.png"]
    assert found.skipped[0][0].endswith("bad.png")
    assert "not an image" in found.skipped[0][1]
    with pytest.raises(DataError, match="at least one readable image"):
        logits_of(model, Images(tmp_path / "bad.png"), bad_images="skip")


def test_nan_is_not_measured(model) -> None:
    torch.nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(InputError, match="row 0 gave NaN"):
        logits_of(model, pixels(2))


def test_two_processes_count_as_one(tmp_path) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import numpy as np, torch
        from tests.evaluation.test_logits import CONFIG, pixels
        from vitkit import ViT
        from vitkit.runtime import Runtime
        from vitkit.evaluation import logits_of
        from vitkit.evaluation.predict import Images
        from vitkit.errors import BadImage
        from vitkit.features import FeatureCache, embed, fill

        runtime = Runtime("cpu")
        assert runtime.ranks == 2
        torch.manual_seed(0)
        model = ViT(CONFIG)
        for n in (1, 2, 7):
            found = logits_of(model, pixels(n), batch_size=2, runtime=runtime)
            alone = logits_of(model, pixels(n), batch_size=2)
            assert found.names == alone.names and (found.labels == alone.labels).all()
            assert np.allclose(found.logits, alone.logits, atol=1e-5)
        try:            # what fails in one process ends both, and neither waits for ever
            logits_of(model, Images([np.zeros((9, 9), np.uint8), b"broken"]), runtime=runtime)
        except BadImage as error:
            assert "image 1" in str(error)
        else:
            raise AssertionError("no BadImage")
        # two processes fill one cache of features, each its part, and both know all of it
        filled = fill(model, pixels(9), FeatureCache(sys.argv[1]), batch_size=2, runtime=runtime, workers=0)
        assert (filled.computed, filled.reused) == (9, 0)
        alone = embed(model, pixels(9), FeatureCache(sys.argv[2]))
        assert np.allclose(filled.read().features, alone.features, atol=1e-5)
        runtime.close()
        print("done", runtime.rank)
    """)
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",  # on a free port
            "--nproc-per-node",
            "2",
            script,
            tmp_path / "both",
            tmp_path / "one",
        ],
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
