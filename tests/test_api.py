"""The public functions in Python: the examples of their docstrings, every interface everywhere, results that show."""

from __future__ import annotations

import doctest
import io
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit import api, huggingface, interfaces, paper
from vitkit.checkpoints import reading
from vitkit.data import order
from vitkit.errors import ConfigError, InputError, UnknownName
from vitkit.model import create

EXAMPLES = [
    test
    for module in (api, interfaces, create, reading, order)
    for test in doctest.DocTestFinder().find(module)
    if test.examples
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_run(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=words.append)
    assert result.failed == 0, "".join(words)


def models() -> dict[str, torch.nn.Module]:
    config = vitkit.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        num_classes=10,
    )
    return {
        "vitkit.ViT": vitkit.ViT(config),
        "paper.ViT": paper.ViT(32, 3, 8, 2, 32, 48, 4, 10),
        "ViTForImageClassification": huggingface.ViTForImageClassification(config),
    }


@pytest.mark.parametrize("kind", list(models()))
def test_every_interface_everywhere(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models()[kind].eval()
    photo = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    path = vitkit.save(model, tmp_path / "m.safetensors")
    said = vitkit.predict(model, photo)[0]
    assert [g.probability for g in vitkit.predict(path, photo)[0].guesses] == pytest.approx(
        [g.probability for g in said.guesses], abs=1e-5
    )
    found = vitkit.evaluate(model, "digits", in_order=True, workers=0)
    assert found.measures.n == 1797
    assert str(found).startswith(f"{round(found.measures.top1 * 1797):,} of 1,797 images right (")
    assert len(repr(found)) < 200  # and no table of logits
    assert str(said) == f"image 0: {said.name} {said.probability:.1%}"
    assert vitkit.embed(model, "digits", cache=tmp_path / "c", workers=0)["all"].features.shape[1] == 32
    found = vitkit.probe(model, "digits", tmp_path / "run", methods=["ridge"], cache=tmp_path / "c", workers=0)
    assert found.evaluation.measures.top1 > 0.3
    assert vitkit.explain(model, photo, tmp_path / "x")[0].predictions
    assert vitkit.summary(model).parameters == sum(p.numel() for p in model.parameters())
    assert torch.allclose(vitkit.walk(model, photo)[-1].value, vitkit.walk(path, photo)[-1].value, atol=1e-5)


def test_one_plot_of_a_model(tmp_path: Path) -> None:
    model = models()["paper.ViT"]
    photo = np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)
    found = vitkit.plot(model, "attention", photo)
    assert found.arrays["attention"].shape == (2, 4, 4, 4)
    assert found.caption.startswith("Each picture is one head")
    assert repr(found).startswith("Attention of the class token")
    assert min(Image.open(io.BytesIO(found._repr_png_())).size) > 100
    first, second = (vitkit.plot(model, "similarity", photo, patch=at).arrays["similarity"] for at in ("0,0", "3,3"))
    assert first.argmax() == 0
    assert second.argmax() == 15
    assert vitkit.plot(model, "occlusion", photo, target="3").arrays["target"] == 3
    assert vitkit.plot(model, "distance", "digits", count=5).arrays["images"] == 5
    with pytest.raises(UnknownName, match="distance"):
        vitkit.plot(model, "distances")
    with pytest.raises(InputError, match="does not have what the plot 'activation' shows"):
        vitkit.plot(model, "activation")


def test_a_notebook_shows_every_figure_and_one_picture_at_a_time() -> None:
    walked = vitkit.walk(models()["vitkit.ViT"])
    cut = vitkit.patches(model="vit-ti/16")
    for figure in (walked.plot("attention"), cut.plot("grid"), vitkit.plot(models()["vitkit.ViT"], "positions").plot()):
        assert min(Image.open(io.BytesIO(figure._repr_png_())).size) > 100
    assert walked.plot("photo").get_suptitle().startswith("The image: 32 x 32")
    for shown in (walked, cut):
        with pytest.raises(UnknownName, match="feature_maps"):
            shown.plot("feature_map")


def test_results_show_themselves(tmp_path: Path) -> None:
    model = models()["vitkit.ViT"]
    photo = np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)
    Image.fromarray(photo).save(tmp_path / "a.png")
    for shown in (
        vitkit.predict(model, photo)[0],
        vitkit.predict(model, tmp_path / "a.png")[0],
        vitkit.evaluate(model, "digits", in_order=True, workers=0),
        vitkit.explain(model, photo, tmp_path / "x")[0],
        vitkit.patches(photo, model),
    ):
        assert min(Image.open(io.BytesIO(shown._repr_png_())).size) > 100
    assert "<table>" in vitkit.summary(model)._repr_html_()
    assert "[1, 17, 32]" in vitkit.walk(model)._repr_html_()


def test_walking_ends_with_the_models_own_answer() -> None:
    """Layer scale, the pre-training head and mean pooling are on the way, not left out."""
    config = vitkit.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        num_classes=5,
        layer_scale=0.3,
        pre_logits=True,
        pool="mean",
        num_register_tokens=2,
    )
    model = vitkit.ViT(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    found = vitkit.walk(model)
    with torch.no_grad():
        assert torch.allclose(found[-1].value, model(found[0].value), atol=1e-5)


def test_walking_has_every_shape_of_the_lesson() -> None:
    model = vitkit.create("vit-b/16", num_classes=3, num_hidden_layers=2).train()
    found = vitkit.walk(model)
    assert model.training  # a walk leaves the model as it was
    lesson = [(1, 3, 224, 224), (1, 768, 14, 14), (1, 768, 196), (1, 196, 768), (1, 1, 768), (1, 197, 768)]
    assert [step.shape for step in found[:6]] == lesson
    assert [(step.equation, step.shape) for step in found[6:]] == [
        ("Eq. 1", (1, 197, 768)),
        ("Eq. 6", (1, 12, 197, 197)),
        *[("Eq. 2", (1, 197, 768)), ("Eq. 3", (1, 197, 768))] * 2,
        ("Eq. 4", (1, 768)),
        ("", (1, 3)),
    ]
    photo, maps, flat, sequence, token, with_token, z_0 = (step.value for step in found[:7])
    assert torch.equal(maps, model.patch_embedding.projection(photo))
    assert torch.equal(flat, maps.flatten(2))
    assert torch.equal(sequence, flat.mT)
    assert torch.equal(with_token, torch.cat([token, sequence], dim=1))
    assert torch.equal(z_0, with_token + model.positions((14, 14)))
    states = model.eval().hidden_states(photo)
    assert torch.allclose(found[9].value, states[1], atol=1e-5)
    assert torch.allclose(found[11].value, states[2], atol=1e-5)
    assert torch.allclose(found.probabilities, model(photo).softmax(-1), atol=1e-6)
    assert [p for _, p in found.best()] == sorted(found.probabilities[0].tolist(), reverse=True)
    assert f"probabilities: {found.best()[0][0]} " in str(found)


def test_walking_without_a_head_has_no_probabilities(tmp_path: Path) -> None:
    found = vitkit.walk(vitkit.create("vit-ti/16", num_classes=0, num_hidden_layers=1, image_size=64))
    assert found[-1].shape == (1, 192)
    assert found.best() == []
    assert "probabilities" not in str(found) + found._repr_html_()
    assert [path.name for path in found.save(tmp_path)][-1] == "8_features.png"


def test_patches_are_an_object(tmp_path: Path) -> None:
    path = vitkit.save(models()["paper.ViT"], tmp_path / "m.safetensors")
    photo = np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)
    of_object, of_file = vitkit.patches(photo, vitkit.load(path)), vitkit.patches(photo, str(path))
    for name, values in of_object.arrays.items():
        np.testing.assert_array_equal(values, of_file.arrays[name])
    assert of_object.shapes["maps"] == (32, 4, 4)
    np.testing.assert_array_equal(of_object.arrays["flattened"], of_object.arrays["maps"][16].reshape(1, 16))
    assert min(of_object.plot().get_size_inches()) > 5


@pytest.mark.parametrize("name", ["vit-x/16", "vit-bb", "x/16"])
def test_a_misspelt_variant_is_reported_as_one(name: str) -> None:
    for function in (vitkit.summary, lambda model: vitkit.patches(model=model)):
        with pytest.raises(UnknownName, match=f"Unknown variant '{name}'"):
            function(name)


def test_what_is_not_a_model_is_named() -> None:
    with pytest.raises(InputError, match="got Linear"):
        vitkit.save(torch.nn.Linear(2, 2), "x.safetensors")


TINY = {"epochs": 2, "batch_size": 256, "workers": 0, "log_every": 2, "report": False, "recipe": "digits"}


@pytest.mark.parametrize("kind", ["vitkit.ViT", "paper.ViT", "ViTForImageClassification"])
def test_training_changes_the_object_that_you_hold(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models()[kind]
    before = [p.detach().clone() for p in model.parameters()]
    run = vitkit.train("digits", tmp_path / "run", model=model, **TINY)
    assert all((a != b).any() for a, b in zip(before, model.parameters(), strict=True))
    photo = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    held, saved = vitkit.predict(model.eval(), photo)[0], vitkit.predict(run.model("last"), photo)[0]
    assert [g.probability for g in held.guesses] == pytest.approx([g.probability for g in saved.guesses], abs=1e-5)
    assert saved.guesses[0].name in "0123456789"


def test_a_run_in_python(tmp_path: Path) -> None:
    seen: list[str] = []
    run = vitkit.train(
        "digits",
        tmp_path / "run",
        model=vitkit.ViTConfig(**SMALL),
        watch=lambda event: seen.append(event["event"]),
        **TINY,
    )
    assert {"start", "step", "train", "val"} <= set(seen)
    assert {name: len(values) for name, values in run.results.items()} == dict.fromkeys(
        ("train_loss", "train_acc", "test_loss", "test_acc"), 2
    )
    assert run.results["train_loss"][1] < run.results["train_loss"][0]
    assert run.curves()["test_acc"][0][-1] == run.info["steps"]
    assert min(Image.open(io.BytesIO(run._repr_png_())).size) > 200
    assert repr(run).startswith("Run(")
    again = vitkit.train(None, tmp_path / "run", resume=True, report=False)
    assert again.results == run.results
    assert vitkit.Run(tmp_path / "run").model().config.hidden_size == 32
    assert vitkit.report(run).name == "report.html"


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
}


def test_a_model_of_your_own_needs_no_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default recipe has no model of its own, and does not ask for one."""
    run = vitkit.train(
        "digits", tmp_path / "run", model=vitkit.ViTConfig(**SMALL), steps=3, warmup=0, report=False, workers=0
    )
    assert run.info["recipe_name"] == "small-data"
    out = capsys.readouterr().out
    assert "small-data: your model," in out
    assert "epoch 0.2/0.2  step 3/3" in out


@pytest.mark.parametrize("what", [None, 3])
def test_what_is_no_image_is_refused(what: object) -> None:
    model = vitkit.create("vit-ti/16", num_classes=3, num_hidden_layers=1)
    for function in (vitkit.predict, vitkit.explain):
        with pytest.raises(InputError, match="Expected an image, a file, a folder, or several of these; got"):
            function(model, what)


def test_walk_takes_a_variant() -> None:
    assert vitkit.walk("vit-ti/16")[1].shape == (1, 192, 14, 14)


def test_mistakes_in_train(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no argument 'epoch', did you mean 'epochs'"):
        vitkit.train("digits", tmp_path / "a", epoch=3)
    with pytest.raises(InputError, match=r"it has 3 outputs, and digits has 10 classes. Build it with num_classes=10"):
        vitkit.train("digits", tmp_path / "b", model=paper.ViT(8, 1, 2, 1, 16, 32, 2, 3), **TINY)
    with pytest.raises(ConfigError, match="A model has no field 'hidden', did you mean 'hidden_act'"):
        vitkit.train("digits", tmp_path / "c", model="vit-ti/16", fields={"hidden": 3}, **TINY)
    assert not list(tmp_path.iterdir())


def test_a_model_of_your_own_on_the_command_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from vitkit.cli import app

    words = ["train", "digits", "--recipe", "digits", "--steps", "2", "--workers", "0", "--no-report"]
    sets = [f"--set={name}={value}" for name, value in {"hidden_size": 48, "num_hidden_layers": 2}.items()]
    done = CliRunner().invoke(app, [*words, *sets, "--optimizer", "adam", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    config = vitkit.load(tmp_path / "run").config
    assert (config.hidden_size, config.num_hidden_layers) == (48, 2)
    done = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "run"), "--resume", "--no-report"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, [*words, "--set", "hidden_size=50", "--out", str(tmp_path / "other")])
    assert "num_attention_heads must divide hidden_size" in str(done.exception)
    done = CliRunner().invoke(app, [*words, "--set", "wide", "--out", str(tmp_path / "other")])
    assert "--set takes FIELD=VALUE" in str(done.exception)


def test_no_public_function_shares_its_name_with_a_module() -> None:
    """Importing `vitkit.x` would replace the function `vitkit.x` by the module."""
    modules = {path.stem for path in Path(vitkit.__file__).parent.iterdir()}
    assert modules & {name for name in vitkit.__all__ if name != "__version__"} == set()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_saves_the_run_and_then_has_its_usual_effect(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name, None)
    if number is None or sys.platform == "win32":
        pytest.skip("this system has no such signal")
    heard: list[int] = []
    before = signal.signal(number, lambda number, frame: heard.append(number))

    def watch(event: dict[str, object]) -> None:
        if (event["event"], event["step"]) == ("step", 2):
            os.kill(os.getpid(), number)

    model = models()["vitkit.ViT"]
    first = model.head.weight.detach().clone()  # type: ignore[union-attr]
    try:
        run = vitkit.train("digits", tmp_path / "run", model=model, watch=watch, **TINY)
    finally:
        signal.signal(number, before)
    assert heard == [number]  # once, after the run was saved
    state = run.folder.latest()
    assert state is not None
    assert state.name == "step-000000000003.safetensors"
    assert not torch.equal(model.head.weight, first)  # type: ignore[arg-type,union-attr]


def test_ctrl_c_ends_a_script_after_saving(tmp_path: Path) -> None:
    def watch(event: dict[str, object]) -> None:
        if (event["event"], event["step"]) == ("step", 2):
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with another
    try:
        with pytest.raises(KeyboardInterrupt):
            vitkit.train("digits", tmp_path / "run", model=models()["vitkit.ViT"], watch=watch, **TINY)
    finally:
        signal.signal(signal.SIGINT, before)
    assert vitkit.Run(tmp_path / "run").folder.latest() is not None
