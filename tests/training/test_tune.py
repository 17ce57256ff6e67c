"""`vitkit tune`: what is chosen and why, what the time allows, and a run folder like any other."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from tests.training.tiny import CONFIG
from tests.training.tiny import vitkit as command
from vitkit.data.base import Pixels, Subset
from vitkit.data.folder import Files
from vitkit.data.sources import open_splits
from vitkit.errors import ConfigError
from vitkit.evaluation.logits import logits_of
from vitkit.features import logistic
from vitkit.features.cache import FeatureCache
from vitkit.features.embed import embed
from vitkit.features.probe import fit
from vitkit.jobs import tuning
from vitkit.jobs.tuning import CANDIDATES, Mirrored, Search, Tried, calibration, needed, paired
from vitkit.runtime import Runtime
from vitkit.training.recipes import RECIPES
from vitkit.training.settings import Settings


@pytest.fixture
def backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    return vitkit.save(vitkit.ViT(dataclasses.replace(CONFIG, num_classes=0)), tmp_path / "backbone.safetensors")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes that are done in a moment; the long one learns, and the short one destroys."""
    for name, changes in {
        "from-probe": {"steps": 3, "lr": 1.0, "warmup": 0, "clip": None},
        "from-probe-long": {"steps": 150, "lr": 3e-3},
        "from-probe-lora": {"steps": 3, "lora": 2},
    }.items():
        changed = {**changes, "epochs": None, "augment": dataclasses.replace(RECIPES[name].augment, scale=(0.9, 1.0))}
        monkeypatch.setitem(RECIPES, name, dataclasses.replace(RECIPES[name], **changed))


def digits(per_class: Any = 20) -> Subset:
    source = open_splits("digits")["all"]()
    numbers = [per_class] * 10 if isinstance(per_class, int) else per_class
    index = [np.flatnonzero(source.labels == k)[:count] for k, count in enumerate(numbers)]
    return Subset(source, np.sort(np.concatenate(index)))


def search(backbone: Path, source: Any, tmp_path: Path, seconds: float = 600.0, **how: Any) -> Search:
    model, cache = vitkit.load(backbone), FeatureCache(tmp_path / "cache")
    features = embed(model, source, cache, workers=0)
    mirrored = embed(model, Mirrored(source), cache, workers=0).features
    settings = Settings(device="cpu", workers=0, trackers=(), **how.pop("settings", {}))
    deadline, runtime = time.perf_counter() + seconds, Runtime("cpu")
    return Search(model, source, features, mirrored, deadline, runtime, settings, say=lambda sentence: None, **how)


def test_the_paired_difference_by_hand() -> None:
    difference = np.array([1.0, 0, 0, -1, 1, 1, 0, 0])
    mean, error = paired(difference, np.ones(8))
    assert mean == 0.25
    assert error == pytest.approx(difference.std() / 8**0.5)
    # two classes of 1 and 3 images: each counts half
    mean, error = paired(np.array([1.0, 0, 0, 0]), np.array([2.0, 2 / 3, 2 / 3, 2 / 3]))
    assert mean == pytest.approx(0.5)
    assert error == pytest.approx((2.0**2 * 0.25 + 3 * (2 / 3) ** 2 * 0.25) ** 0.5 / 4)


def test_many_candidates_without_a_gain_replace_the_probe_no_more_often_than_one() -> None:
    assert needed(0) == needed(1) == 1.0
    gains = np.random.default_rng(0).standard_normal((20_000, 5))  # in standard errors
    for candidates in (1, 2, 3, 5):
        assert (gains[:, :candidates].max(1) > needed(candidates)).mean() == pytest.approx(0.159, abs=0.01)


def test_a_gain_that_one_candidate_may_have_is_not_enough_for_the_best_of_three() -> None:
    rows = [Tried(name, "", 0.8, gain, 0.01) for name, gain in (("a", 0.013), ("b", -0.02), ("c", 0.0))]
    found = Search.__new__(Search)
    for tried, better in ((rows[:1], [True]), (rows, [False] * 3)):
        found.needed = needed(len(tried))
        assert [found._better(row) for row in tried] == better


def test_the_calibration_finds_a_planted_temperature() -> None:
    rng = np.random.default_rng(0)
    logits = 2 * rng.standard_normal((4000, 5))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = np.array([rng.choice(5, p=row) for row in p])
    logits[7] = np.nan  # an image that was not held out
    factor, (before, after) = calibration(4 * logits, y)
    assert factor == pytest.approx(0.25, rel=0.13)
    assert after < before


def test_a_gain_is_chosen_and_a_loss_is_not(backbone: Path, quick: None, tmp_path: Path) -> None:
    source = digits(40)
    found = search(backbone, source, tmp_path)()
    rows = {row.name: row for row in found.tried}
    assert list(rows) == ["probe", "from-probe-lora", "from-probe", "from-probe-long"]  # few images: adapters first
    assert found.name == "from-probe-long"
    assert [row.name for row in found.tried if row.chosen] == ["from-probe-long"]
    long, short, probe = rows["from-probe-long"], rows["from-probe"], rows["probe"]
    assert long.gain > needed(3) * long.error > 0
    assert long.gain == pytest.approx(long.accuracy - probe.accuracy)
    assert short.gain < 0
    assert short.verdict.endswith("not more than 1.6 standard errors.")
    assert {row.images for row in rows.values()} == {400}
    assert not found.flip  # mirrored digits are other shapes
    # its confidence is calibrated: the head carries the factor
    test = Subset(source.source, np.setdiff1d(np.arange(1797), source.indices.numpy()))
    outputs = logits_of(found.model, test)
    assert found.nll is not None
    assert found.nll[1] <= found.nll[0]
    with torch.no_grad():
        for parameter in found.model.head.parameters():
            parameter.div_(found.factor)
    plain = logits_of(found.model, test).logits
    np.testing.assert_allclose(plain * found.factor, outputs.logits, rtol=1e-3, atol=1e-3)


def test_the_same_seed_gives_the_same_choice_and_weights(
    backbone: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "from-probe-long", dataclasses.replace(RECIPES["from-probe-long"], steps=15))
    one, two = (search(backbone, digits(12), tmp_path, folds=2)() for _ in range(2))
    assert [(row.name, row.gain, row.error) for row in one.tried] == [(r.name, r.gain, r.error) for r in two.tried]
    assert all(torch.equal(a, b) for a, b in zip(one.model.state_dict().values(), two.model.state_dict().values()))


def test_the_probe_stays_without_a_gain(backbone: Path, quick: None, tmp_path: Path) -> None:
    found = search(backbone, digits(12), tmp_path, candidates=("from-probe",))()
    assert found.name == "probe"
    assert found.tried[0].chosen
    assert found.tried[0].verdict == "Chosen. Nothing else gained more than one standard error."
    assert not found.metrics
    backbone_now = vitkit.load(backbone).state_dict()
    assert all(
        torch.equal(value, backbone_now[name])
        for name, value in found.model.state_dict().items()
        if name in backbone_now
    )


def test_what_does_not_fit_in_the_time_is_named(backbone: Path, quick: None, tmp_path: Path) -> None:
    found = search(backbone, digits(12), tmp_path, seconds=0.0)()
    assert found.name == "probe"
    assert [row.name for row in found.tried] == ["probe", *sorted(CANDIDATES, key=lambda name: "lora" not in name)]
    assert all(row.verdict.startswith("Did not fit in the time: it would take about ") for row in found.tried[1:])


def test_unequal_classes_count_the_same(backbone: Path, quick: None, tmp_path: Path, monkeypatch: Any) -> None:
    seen, start = list[str](), tuning.train_into

    def watched(ready: Any, *rest: Any) -> Any:
        seen.append(ready.recipe.class_weights)
        return start(ready, *rest)

    monkeypatch.setattr(tuning, "train_into", watched)
    found = search(backbone, digits([60, *[6] * 9]), tmp_path, candidates=("from-probe-lora",))()
    assert found.judge == "balanced accuracy"
    assert [row.name for row in found.tried] == ["probe", "probe-balanced", "from-probe-lora"]
    assert set(seen) == {"balanced"}
    # by hand: the mean of the classes' recalls
    probe = next(row for row in found.tried if row.name == "probe")
    again = search(backbone, digits([60, *[6] * 9]), tmp_path, candidates=())
    y, X, recalls = again.y, again.X, []
    C = fit("logistic", X, y, again.names).chosen["C"]
    right = np.zeros(len(y), bool)
    for inside, outside in logistic.folds(y, 3, 0):
        right[outside] = again._head(inside, C).logits(X[outside]).argmax(1) == y[outside]
    recalls = [right[y == k].mean() for k in range(10)]
    assert probe.accuracy == pytest.approx(np.mean(recalls))


def test_a_class_with_one_image_leaves_the_probe(backbone: Path, tmp_path: Path) -> None:
    found = search(backbone, digits([1, *[6] * 9]), tmp_path)()
    assert found.name == "probe"
    assert "a class has one image" in found.tried[0].verdict


def test_mirrored_images() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(1, 2, 6, 1)
    source = Pixels(image, [0], ("a",))
    assert np.array_equal(np.asarray(Mirrored(source).read(0)[0]), image[0, :, ::-1, 0])


def photos(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, count in {"train": 8, "test": 4}.items():
        for k, name in enumerate(("dark", "grey", "light")):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 60, (10, 12)) + 90 * k
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / name / f"{i}.png")
    return folder


def test_the_command_and_the_run_folder(
    backbone: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = photos(tmp_path / "photos"), tmp_path / "run"
    common = ["--device", "cpu", "--workers", "0"]
    code, text, err = command(
        monkeypatch, capsys, "tune", str(data), "--from", str(backbone), "--out", str(out), "--json", *common
    )
    assert code == 0, err
    found = json.loads(text)
    assert found["n"] == 12
    assert found["tried"][0]["name"] == "probe"
    assert sum(row["chosen"] for row in found["tried"]) == 1
    assert "probe: features of 24 training images" in err
    page = (out / "tune.html").read_text(encoding="utf-8")
    assert all(row["name"] in page and row["verdict"] in page.replace("&#39;", "'") for row in found["tried"])
    assert "<svg" in page
    assert (out / "report.html").is_file()
    info = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert (info["kind"], info["data"]["train"], info["data"]["test"]) == ("tune", 24, 12)

    # the run can be used like any other
    code, text, _ = command(monkeypatch, capsys, "eval", str(out), str(data), "--json", *common)
    assert code == 0
    assert json.loads(text)["top1"] == found["top1"]
    assert command(monkeypatch, capsys, "predict", str(out), str(data / "test" / "dark" / "0.png"))[0] == 0
    assert command(monkeypatch, capsys, "report", str(out))[0] == 0
    assert command(monkeypatch, capsys, "card", str(out))[0] == 0
    assert "tune" in command(monkeypatch, capsys, "runs", str(tmp_path))[1]
    code, _, err = command(monkeypatch, capsys, "tune", str(data), "--from", str(backbone), "--out", str(out), *common)
    assert (code, "holds a run" in err) == (2, True)


def test_the_test_part_is_read_once(
    backbone: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, reads, raw = photos(tmp_path / "photos"), list[Path](), Files.raw

    def watched(self: Files, i: int) -> Any:
        reads.append(self.place(i))  # type: ignore[arg-type]
        return raw(self, i)

    monkeypatch.setattr(Files, "raw", watched)
    vitkit.tune(backbone, data, tmp_path / "run", workers=0, device="cpu", report=False, progress=False)
    test = [path for path in reads if "test" in path.relative_to(data).parts]
    assert len(test) == len(set(test)) == 12
    assert len(reads) > 24 + 12


def test_nonsense_is_refused(backbone: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="minutes must be"):
        vitkit.tune(backbone, "digits", tmp_path / "run", minutes=0)
    with pytest.raises(ConfigError, match="folds must be"):
        vitkit.tune(backbone, "digits", tmp_path / "run", folds=1)
