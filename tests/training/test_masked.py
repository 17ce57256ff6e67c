"""Masked patch prediction: the corruption's statistics, the targets by hand, runs that resume, weights that travel."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from tests.training.test_loop import stop_at
from tests.training.tiny import CONFIG, SETTINGS, apart, bytes_of, forked, run, tiny
from tests.training.tiny import vitkit as command
from vitkit.checkpoints import containers
from vitkit.data.mix import Mix
from vitkit.data.preprocess import preprocess
from vitkit.data.train_loader import TrainLoader
from vitkit.errors import ConfigError, DataError, InputError
from vitkit.jobs.pretrain import learner_of, pictures, write_picture
from vitkit.jobs.splits import unlabelled
from vitkit.jobs.train import prepare
from vitkit.model.config import InputSpec, ViTConfig
from vitkit.runtime import Runtime
from vitkit.training.masked import (
    TARGETS,
    VALIDATION,
    Corruption,
    MaskedPatches,
    class_colours,
    colour_classes,
    cut,
    joined,
    keys_of,
)
from vitkit.training.objectives import OBJECTIVES
from vitkit.training.recipe import Objective, Recipe, Target
from vitkit.training.run_folder import RunFolder

# 8-pixel digits in patches of 2: sixteen patches.
SIXTEEN = dataclasses.replace(CONFIG, patch_size=2)
MASKED = tiny(objective="masked-patch", config=SIXTEEN)


def masked(**changes: object) -> Recipe:
    return dataclasses.replace(MASKED, **changes)


def model(config: ViTConfig = SIXTEEN, **changes: object) -> vitkit.ViT:
    torch.manual_seed(0)
    return vitkit.ViT(dataclasses.replace(config, num_classes=0, **changes)).eval()


def test_the_recipe_names_the_rows_of_the_tables() -> None:
    from typing import get_args

    assert get_args(Objective) == tuple(OBJECTIVES)
    assert get_args(Target) == tuple(TARGETS)


# --- the corruption


def test_half_of_the_patches_in_shares_of_80_10_10() -> None:
    B, N = 4000, 50
    found = Corruption.draw(keys_of(0, 3, torch.arange(B)), N)
    assert found.places.shape == (B, N // 2)
    corrupted = torch.zeros(B, N).scatter(1, found.places, 1.0)
    assert (corrupted.sum(1) == N // 2).all()  # no patch is chosen twice
    own = torch.arange(N)
    masked, swapped = found.masked, found.shown != own
    assert not (masked & swapped).any()
    assert not ((masked | swapped) & (corrupted == 0)).any()  # nothing else is touched
    total = B * N / 2
    for share, expected in ((masked.sum() / total, 0.8), (swapped.sum() / total, 0.1)):
        assert abs(float(share) - expected) < 4 * (expected * (1 - expected) / total) ** 0.5
    # Every patch is as likely as any other to be corrupted, and to be shown in place of another.
    assert np.allclose(corrupted.mean(0), 0.5, atol=4 * 0.5 / B**0.5)
    away = (found.shown - own)[swapped] % N
    counts = torch.bincount(away, minlength=N).double()
    assert counts[0] == 0
    expected = counts.sum() / (N - 1)
    assert float(((counts[1:] - expected) ** 2 / expected).sum()) < 95  # chi-square of 48 degrees of freedom, p < 1e-4
    # Images do not share their places: two of them agree in a quarter of all patches.
    assert abs(float((corrupted[1:] * corrupted[:-1]).mean()) - 0.25) < 0.005


def test_an_image_keeps_its_corruption_in_any_batch() -> None:
    index = torch.tensor([5, 900, 17, 5])
    whole = Corruption.draw(keys_of(1, 8, index), 16)
    part = Corruption.draw(keys_of(1, 8, index[2:]), 16)
    for name in ("places", "masked", "shown"):
        assert torch.equal(getattr(whole, name)[2:], getattr(part, name))
    assert torch.equal(whole.places[0], whole.places[3])
    others = [keys_of(2, 8, index), keys_of(1, 9, index), keys_of(1, VALIDATION, index)]
    assert all(not torch.equal(keys, keys_of(1, 8, index)) for keys in others)
    assert (
        len({int(key) for seed in range(3) for step in range(50) for key in keys_of(seed, step, torch.arange(50))})
        == 7500
    )


def test_corrupting_embeddings() -> None:
    z = torch.arange(6.0).view(1, 6, 1).expand(1, 6, 2)
    masked = torch.tensor([[False, True, False, False, False, False]])
    shown = torch.tensor([[0, 1, 5, 3, 4, 5]])
    found = Corruption(torch.tensor([[1, 2, 3]]), masked, shown).apply(z, torch.full((1, 1, 2), -7.0))
    assert found[0, :, 0].tolist() == [0, -7, 5, 3, 4, 5]


def test_the_mask_token_is_that_of_the_twelve_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every corrupted patch masked, the tokens are those of ViTModel with bool_masked_pos."""
    vit = model()
    learner = MaskedPatches(vit, "mean").eval()
    torch.nn.init.normal_(learner.mask_token)
    x, keys = torch.rand(3, 1, 8, 8), keys_of(0, 0, torch.arange(3))
    drawn = Corruption.draw(keys, 16)
    masked = torch.zeros(3, 16, dtype=torch.bool).scatter(1, drawn.places, True)
    monkeypatch.setattr(
        Corruption, "draw", classmethod(lambda cls, *_: cls(drawn.places, masked, torch.arange(16).expand(3, -1)))
    )
    twelve = vitkit.huggingface.ViTModel(vit.config, add_pooling_layer=False, use_mask_token=True)
    tensors = vitkit.as_huggingface(vit).state_dict()
    twelve.load_state_dict({**tensors, "embeddings.mask_token": learner.mask_token.detach()})
    tokens = twelve.eval()(x, bool_masked_pos=masked).last_hidden_state[:, 1:]
    seen: list[torch.Tensor] = []
    learner.predictor.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    learner.predict(x, keys)
    assert torch.allclose(seen[0], tokens.gather(1, drawn.places[:, :, None].expand(-1, -1, 32)), atol=1e-5)


# --- the targets


def test_colour_classes_by_hand() -> None:
    levels = torch.tensor([[255.0, 31.0, 32.0], [0.0, 0.0, 96.0], [32.0, 31.9, 255.0]])  # RGB x three cells
    assert colour_classes(levels).tolist() == [7 * 64 + 0 * 8 + 1, 0, 1 * 64 + 3 * 8 + 7]
    back = class_colours(torch.tensor([449]), 3)
    assert back[:, 0].tolist() == [7 * 32 + 16, 16, 32 + 16]
    every = torch.arange(512)
    assert torch.equal(colour_classes(class_colours(every, 3)), every)


def checker() -> torch.Tensor:
    """An 8 x 8 grey image of 8-bit levels: four patches of 4 x 4; the last one half black, half white."""
    image = torch.zeros(8, 8)
    image[:4, :4], image[:4, 4:], image[4:, :4] = 31, 32, 200
    image[4:, 6:] = 255
    return image


@pytest.mark.parametrize(
    "spec",
    [
        InputSpec(size=(8, 8), mean=(0.5,), std=(0.5,), channels="gray"),
        InputSpec(size=(8, 8), mean=(0.2860,), std=(0.3530,), channels="gray"),
    ],
)
def test_targets_by_hand(spec: InputSpec) -> None:
    vit = model(CONFIG)
    vit.input_spec = spec
    x = (checker() / 255 - spec.mean[0])[None, None] / spec.std[0]
    learner = MaskedPatches(vit, "mean")
    patches, levels = learner.patches(x)
    assert levels.shape == (1, 4, 1, 4, 4)
    assert levels[0, 3, 0, 0].tolist() == [0, 0, 255, 255]
    assert TARGETS["mean"].of(patches, levels)[0, :, 0].tolist() == [0, 1, 6, 127.5 // 32]
    small = TARGETS["4x4"].of(patches, levels)[0]
    assert small[2].tolist() == [6] * 16
    assert small[3].tolist() == [0, 0, 7, 7] * 4  # patches of 4 pixels are their own 4 x 4 version
    assert torch.equal(TARGETS["patch"].of(patches, levels)[0, 3], x[0, 0, 4:, 4:].flatten())
    assert torch.equal(joined(cut(x, (2, 2)), (2, 2)), x)


def test_a_large_patch_is_averaged_down() -> None:
    patch = torch.zeros(1, 1, 3, 16, 16)
    patch[..., 0, :4, :4] = 255.0  # red in the first cell
    patch[..., 1, 12:, 12:] = torch.tensor([0.0, 128.0]).repeat(2)  # green, 64 on average, in the last one
    found = TARGETS["4x4"].of(patch, patch)[0, 0]
    assert found.tolist() == [7 * 64] + [0] * 14 + [2 * 8]
    assert TARGETS["4x4"].outputs(3, 256) == 16 * 512
    assert TARGETS["mean"].outputs(3, 256) == 512
    assert TARGETS["patch"].outputs(3, 256) == 768


def test_losses_by_hand() -> None:
    logits = torch.zeros(2, 3, 8)
    logits[0, :, 5] = 100.0
    loss, right = TARGETS["mean"].loss(logits, torch.tensor([[[5], [5], [1]], [[0], [3], [0]]]))
    assert loss[0] == pytest.approx(100 / 3)
    assert loss[1] == pytest.approx(np.log(8))
    assert right[0] == pytest.approx(2 / 3)
    loss, right = TARGETS["patch"].loss(torch.ones(1, 2, 4), torch.tensor([[[1.0, 1, 1, 1], [3.0, 1, 1, 1]]]))
    assert loss.tolist() == [0.5]


def test_only_corrupted_patches_are_predicted() -> None:
    """The loss is that of the corrupted places alone."""
    learner = MaskedPatches(model(), "patch").eval()
    x, keys = torch.rand(1, 1, 8, 8), keys_of(0, 0, torch.arange(1))
    predicted, corruption = learner.predict(x, keys)
    assert predicted.shape == (1, 8, 4)
    patches, _ = learner.patches(x)
    expected = ((predicted - patches.flatten(2)[0, corruption.places[0]]) ** 2).mean()
    with torch.no_grad():
        assert float(learner(x, keys)[0]) == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("changes", "target", "words"),
    [
        ({"patch_size": 8, "image_size": 8}, "mean", "at least two patches"),
        ({}, "4x4", "at least 4 pixels; use --target mean or patch"),
        ({"num_channels": 6}, "mean", "too many for C = 6"),
    ],
)
def test_models_that_a_target_does_not_fit(changes: dict, target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MaskedPatches(model(**changes), target)


# --- runs


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    folder, outcome = run(tmp_path / "r", masked(ema=0.9))
    rows = folder.metrics()
    judged = [row for row in rows if row["event"] == "val"]
    assert outcome.best == min(row["loss"] for row in judged)
    assert all(0 <= row["top1"] <= 1 and "top5" not in row for row in judged)
    assert folder.info["data"]["classes"] == []
    assert folder.info["data"]["train"] + folder.info["data"]["val"] == 1797
    loaded = vitkit.load(tmp_path / "r")
    assert (loaded.config.num_classes, loaded.input_spec.class_names) == (0, ())
    for which in ("last", "ema"):
        names = containers.read(tmp_path / "r" / f"{which}.safetensors")[0]
        assert {name for name in names if "/" in name} == {
            f"pretraining/{name}" for name in ("mask_token", "predictor.weight", "predictor.bias")
        }
    last, ema = (
        containers.read(tmp_path / "r" / f"{which}.safetensors")[0]["pretraining/mask_token"]
        for which in ("last", "ema")
    )
    assert not torch.equal(last, ema)  # the average has a mask token of its own
    assert last.abs().max() > 0


def test_the_twelve_classes_get_the_learnt_mask_token(tmp_path: Path) -> None:
    run(tmp_path / "r", MASKED)
    learnt = containers.read(tmp_path / "r" / "best.safetensors")[0]["pretraining/mask_token"]
    twelve = vitkit.huggingface.ViTModel.from_pretrained(str(tmp_path / "r"), use_mask_token=True)
    assert torch.equal(twelve.embeddings.mask_token, learnt)
    assert learnt.abs().max() > 0
    assert vitkit.huggingface.ViTModel.from_pretrained(str(tmp_path / "r")).embeddings.mask_token is None
    vitkit.save(vitkit.load(tmp_path / "r"), tmp_path / "plain.safetensors")
    plain = vitkit.huggingface.ViTModel.from_pretrained(str(tmp_path / "plain.safetensors"), use_mask_token=True)
    assert plain.embeddings.mask_token.abs().max() == 0
    with pytest.raises(InputError, match="has no mask token"):
        vitkit.huggingface.ViTForImageClassification.from_pretrained(str(tmp_path / "r"), use_mask_token=True)


def test_validation_by_hand(tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "r", MASKED)
    learner, (_, val, _) = learner_of(RunFolder.open(tmp_path / "r")), unlabelled("digits", 0.1, 0)
    x = torch.stack([preprocess(val.read(i)[0], learner.vit.input_spec) for i in range(len(val))])
    with torch.no_grad():
        loss, right = learner(x, keys_of(0, VALIDATION, torch.arange(len(val))))
    best = min((row for row in folder.metrics() if row["event"] == "val"), key=lambda row: row["loss"])
    assert best["loss"] == pytest.approx(float(loss.mean()), rel=1e-5)
    assert best["top1"] == pytest.approx(float(right.mean()), rel=1e-5)
    assert best["images"] == len(val)


def test_regression_has_no_accuracy(tmp_path: Path) -> None:
    folder, outcome = run(tmp_path / "r", masked(target="patch"))
    assert all("accuracy" not in row and "top1" not in row for row in folder.metrics())
    assert outcome.best is not None


def test_one_update_is_the_mean_gradient_of_the_batch(tmp_path: Path) -> None:
    recipe = masked(optimizer="sgd", weight_decay=0.0, steps=1, warmup=0, clip=None)
    ready = prepare("digits", tmp_path / "x", recipe=recipe, settings=SETTINGS)
    learner = MaskedPatches(ready.model, "mean")
    before = {name: p.detach().clone() for name, p in learner.named_parameters()}
    loader = TrainLoader(ready.train, ready.model.input_spec, recipe.augment, batch_size=16, workers=0)
    batch = next(loader.batches(0, 1))
    learner.train()(batch.pixels, keys_of(0, 0, batch.index))[0].mean().backward()
    run(tmp_path / "r", recipe, settings={"micro_batch": 4})
    found = containers.read(RunFolder.open(tmp_path / "r").latest())[0]
    for name, p in learner.named_parameters():
        assert torch.allclose(found[f"model/{name}"], before[name] - 1e-3 * p.grad, atol=1e-6), name
    assert learner.predictor.weight.grad.abs().max() > 0


@pytest.mark.parametrize("changes", [{}, {"target": "patch", "dropout": 0.1, "drop_path": 0.1, "ema": 0.9}])
def test_killed_and_resumed_to_the_bit(changes: dict, tmp_path: Path) -> None:
    recipe = masked(**changes)
    run(tmp_path / "whole", recipe)

    def die_at(step: int):
        def watch(event: dict) -> None:
            if event["event"] == "step" and event["step"] == step:
                os.kill(os.getpid(), signal.SIGKILL)

        return watch

    for step in (6, 11):
        ended = forked(lambda rank, step=step: run(tmp_path / "r", recipe, resume=True, watch=die_at(step)))
        assert ended == [-signal.SIGKILL]
    assert forked(lambda rank: run(tmp_path / "r", recipe, resume=True)) == [0]
    assert bytes_of(tmp_path / "r") == bytes_of(tmp_path / "whole")


def test_another_target_is_not_resumed(tmp_path: Path) -> None:
    run(tmp_path / "r", MASKED, watch=stop_at(3))
    with pytest.raises(ConfigError, match="target"):
        run(tmp_path / "r", masked(target="patch"), resume=True)


def test_two_processes_end_where_one_does(tmp_path: Path) -> None:
    recipe = masked(steps=4, warmup=0)
    run(tmp_path / "one", recipe)
    assert forked(lambda rank: run(tmp_path / "two", recipe), ranks=2) == [0, 0]
    assert apart(tmp_path / "one", tmp_path / "two") < 1e-6


def test_bf16(tmp_path: Path) -> None:
    torch._C._set_mkldnn_enabled(False)  # some virtual CPUs advertise bf16 instructions that they do not have
    try:
        folder, outcome = run(tmp_path / "r", MASKED, settings={"precision": "bf16"})
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert outcome.step == 12
    assert containers.read(folder.weights())[0]["pretraining/predictor.weight"].dtype == torch.float32


def test_it_learns_and_helps_to_draw(tmp_path: Path) -> None:
    recipe = masked(steps=150, batch_size=64, lr=3e-3)
    folder, _ = run(tmp_path / "r", recipe, settings={"evaluate_every": 50})
    losses = [row["loss"] for row in folder.metrics() if row["event"] == "train"]
    assert losses[0] == pytest.approx(np.log(8), abs=0.05)  # eight greys, all as likely: the predictor starts at zero
    assert losses[-1] < 1.75
    found = pictures(RunFolder.open(tmp_path / "r"), unlabelled("digits", 0.1, 0)[1], 3)
    photo, hidden, predicted = found["photo"], found["masked"], found["predicted"]
    assert photo.shape == (3, 8, 8, 1)
    changed = (predicted != photo).reshape(3, 4, 2, 4, 2).any((2, 4))
    assert (changed.sum((1, 2)) <= 8).all()  # half of the sixteen patches at most
    assert ((hidden == 128).reshape(3, 4, 2, 4, 2).all((2, 4)).sum((1, 2)) >= 3).all()
    assert set(np.unique(predicted.reshape(3, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4)[changed])) <= set(range(16, 256, 32))
    with Image.open(write_picture(RunFolder.open(tmp_path / "r"))) as image:
        assert min(image.size) > 100


# --- data without labels, and the command


def photos(folder: Path, names: list[str]) -> Path:
    rng = np.random.default_rng(0)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (12, 10, 3), np.uint8)).save(folder / name)
    return folder


def test_folders_without_labels(tmp_path: Path) -> None:
    flat = photos(tmp_path / "flat", [f"{i}.png" for i in range(9)] + ["deep/er/x.png", ".hidden/no.png"])
    train, val, _ = unlabelled(flat, 0.2, 0)
    assert sorted([*train.names, *val.names]) == sorted([f"{i}.png" for i in range(9)] + ["deep/er/x.png"])
    assert (len(val), train.class_names, set(train.labels)) == (2, (), {0})
    parts = photos(tmp_path / "parts", ["train/a.png", "train/b/c.png", "val/d.png", "test/e.png"])
    train, val, _ = unlabelled(parts, 0.2, 0)
    assert (list(train.names), list(val.names)) == (["a.png", "b/c.png"], ["d.png"])
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no images to train on"):
        unlabelled(tmp_path / "none", 0.1, 0)
    one = photos(tmp_path / "one", ["a.png"])
    with pytest.raises(DataError, match="Use --val 0"):
        unlabelled(one, 0.1, 0)
    assert len(unlabelled(one, 0.0, 0)[0]) == 1
    digits, held, _ = unlabelled("digits", 0.1, 0)
    assert (len(digits) + len(held), digits.class_names) == (1797, ())


def test_pretrain_then_fine_tune_and_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", [f"{i}.png" for i in range(20)])
    small = [
        "--set",
        "hidden_size=32",
        "--set",
        "num_hidden_layers=2",
        "--set",
        "num_attention_heads=2",
        "--set",
        "intermediate_size=64",
        "--image-size",
        "32",
        "--device",
        "cpu",
        "--tracker",
        "none",
        "--workers",
        "0",
    ]
    code, out, err = command(
        monkeypatch, capsys, "pretrain", "photos", "--out", "pre", "--steps", "4", "--batch-size", "8", *small
    )
    assert code == 0, err
    assert "20 images without labels" not in out  # two are held out
    assert "18 images without labels (2 for validation)" in out
    assert "lowest validation loss" in out
    assert "vitkit train DATA --from pre" in out
    assert (tmp_path / "pre" / "masked.png").is_file()
    page = (tmp_path / "pre" / "report.html").read_text(encoding="utf-8")
    assert "Predicted patches" in page
    assert "needed no labels" in page
    labelled = photos(tmp_path / "labelled", [f"{c}/{i}.png" for c in "ab" for i in range(6)])
    code, out, err = command(
        monkeypatch,
        capsys,
        "train",
        str(labelled),
        "--from",
        "pre",
        "--out",
        "tuned",
        "--steps",
        "2",
        "--warmup",
        "0",
        "--batch-size",
        "4",
        "--device",
        "cpu",
        "--tracker",
        "none",
        "--workers",
        "0",
        "--no-report",
    )
    assert code == 0, err
    tuned, pre = vitkit.load("tuned"), vitkit.load("pre")
    assert tuned.input_spec.class_names == ("a", "b")
    moved = (tuned.blocks[0].mlp.fc1.weight - pre.blocks[0].mlp.fc1.weight).abs().max().item()
    assert 0 < moved < 0.01  # it started from these weights
    code, out, err = command(
        monkeypatch, capsys, "probe", str(labelled), "--from", "pre", "--out", "probed", "--workers", "0"
    )
    assert code == 0, err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["digits", "--out", "r", "--objective", "classify"], "needs labels; use `vitkit train`"),
        (["digits", "--out", "r", "--objective", "mask"], "Unknown objective"),
        (["digits", "--out", "r", "--recipe", "digits"], "'digits' is for classify"),
        (["digits", "--out", "r", "--target", "means"], "target must be one of mean, 4x4, patch"),
        (["digits", "--out", "r", "--image-size", "8"], "at least two patches"),
        (["digits"], "Give --out"),
    ],
)
def test_mistakes(
    args: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command(monkeypatch, capsys, "pretrain", *args, "--device", "cpu")
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_mixing_and_fp8_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without MixUp and CutMix"):
        run(tmp_path / "r", masked(mix=Mix(mixup=0.2)))
    with pytest.raises(ConfigError, match="use --precision bf16 with masked-patch"):
        run(tmp_path / "r", MASKED, settings={"precision": "fp8"})
    assert Runtime("cpu").main


def test_a_subset_is_stratified_and_nested() -> None:
    from vitkit.data.base import subset

    labels = np.repeat([0, 1, 2], [100, 50, 7])
    large, small = subset(labels, 0.4, 3), subset(labels, 0.1, 3)
    assert np.bincount(labels[small]).tolist() == [10, 5, 1]
    assert np.bincount(labels[large]).tolist() == [40, 20, 3]
    assert set(small) < set(large)
    assert set(subset(labels, 0.1, 4)) != set(small)
    assert len(subset(labels, 157, 0)) == 157
    for wanted in (158, 2):
        with pytest.raises(ConfigError, match="at most 157 training images"):
            subset(labels, wanted, 0)


def test_training_on_a_subset(tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "r", tiny(images=0.1))
    counts = folder.info["data"]["counts"]
    assert folder.info["data"]["train"] == sum(counts.values()) == pytest.approx(162, abs=5)
    assert folder.info["data"]["val"] == 179  # the validation part stays whole
