"""`--show-augmentations`: the pictures are the first mixed batch of the run, next to the originals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.training.tiny import SETTINGS, tiny, vitkit
from vitkit.data.mix import Mix
from vitkit.data.preprocess import normalize
from vitkit.data.train_loader import TrainLoader
from vitkit.jobs.augmentations import samples
from vitkit.jobs.train import Prepared, prepare
from vitkit.training.recipe import Recipe


def ready(tmp_path: Path, recipe: Recipe) -> Prepared:
    return prepare("digits", tmp_path / "never", recipe=recipe, settings=SETTINGS)


@pytest.mark.parametrize("mix", [Mix(), Mix(mixup=0.5), Mix(cutmix=1.0, probability=0.3)])
def test_they_are_what_the_run_trains_on(mix: Mix, tmp_path: Path) -> None:
    run = ready(tmp_path, tiny(mix=mix))
    found, spec = samples(run), run.model.input_spec
    loader = TrainLoader(run.train, spec, run.recipe.augment, batch_size=16, mix=mix, workers=0)
    batches = loader.batches(0, 40)
    batch = next(b for b in batches if not mix or (b.weight < 1).all())
    assert [sample.name for sample in found] == [run.train.names[i] for i in batch.index]
    for place, sample in enumerate(found):
        seen = normalize([torch.from_numpy(sample.seen[:, :, :1].copy()).permute(2, 0, 1)[None]], spec)[0]
        torch.testing.assert_close(seen, batch.pixels[place], atol=1.1 / 255 / min(spec.std), rtol=0)
        image, label = run.train.read(int(batch.index[place]))
        assert np.array_equal(sample.original[:, :, 0], np.asarray(image).reshape(8, 8))
        assert sample.label == str(label)
        own, other, share = int(batch.labels[place]), int(batch.others[place]), float(batch.weight[place])
        parts = sorted([(share, str(own)), (1 - share, str(other))], reverse=True)
        expected = str(own) if own == other else ", ".join(f"{name} {part:.0%}" for part, name in parts)
        assert sample.target == expected


def test_a_large_batch_is_cut(tmp_path: Path) -> None:
    assert len(samples(ready(tmp_path, tiny(batch_size=64)))) == 16


def test_the_command_draws_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    how = ["train", "digits", "--recipe", "digits", "--device", "cpu", "--show-augmentations", "seen.png"]
    code, out, err = vitkit(monkeypatch, capsys, *how)
    assert code == 0, err
    assert "picture: seen.png" in out
    with Image.open("seen.png") as image:
        assert image.size[0] > 800
    assert [path.name for path in tmp_path.iterdir()] == ["seen.png"]
