"""config.toml: every run writes the file that repeats it, to the bit; the command line wins; mistakes are named."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.training.test_loop import with_a_head
from tests.training.tiny import CONFIG, SETTINGS, bytes_of, run, tiny, vitkit
from vitkit.cli import app
from vitkit.cli.run_options import RECIPE
from vitkit.cli.run_options import SETTINGS as OPTIONS
from vitkit.data.mix import Mix
from vitkit.training.config_file import FIELDS, as_toml, repeat, toml_lines
from vitkit.training.recipe import Recipe
from vitkit.training.recipes import RECIPES
from vitkit.training.run_folder import RunFolder
from vitkit.training.settings import Settings

MACHINE = ["--device", "cpu", "--workers", "0", "--tracker", "none", "--no-report"]


def command(monkeypatch: Any, capsys: Any, *args: str | Path) -> tuple[int, str, str]:
    return vitkit(monkeypatch, capsys, "train", *map(str, args))


def test_options_are_fields() -> None:
    assert set(RECIPE) <= {f.name for f in dataclasses.fields(Recipe)}
    assert set(OPTIONS) == {f.name for f in dataclasses.fields(Settings)}
    given = {option.name for option in typer.main.get_command(app).commands["train"].params}  # type: ignore[attr-defined]
    assert {*OPTIONS, *RECIPE} - given == {"target", "images"}  # those are for pretrain


@pytest.mark.parametrize(
    "options",
    [
        ["--steps", "3", "--warmup", "0", "--seed", "5", "--set", "hidden_size=32", "--set", "norms=['final']"],
        ["--epochs", "0.1", "--batch-size", "64", "--lr-rule", "sqrt", "--micro-batch", "16", "--evaluate-every", "2"],
        ["--steps", "2", "--warmup", "0", "--freeze", "blocks.0.*", "--dropout", "0.1", "--ema", "0.9"],
    ],
)
def test_the_file_repeats_the_run(options: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    options = [option.replace("'", '"') for option in options]
    code, _, err = command(
        monkeypatch, capsys, "digits", "--recipe", "digits", *options, *MACHINE, "--out", tmp_path / "a"
    )
    assert code == 0, err
    code, _, err = command(
        monkeypatch, capsys, "--config", tmp_path / "a/config.toml", "--out", tmp_path / "b", "--no-report"
    )
    assert code == 0, err
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    one, two = (RunFolder.open(tmp_path / name) for name in "ab")
    for name in ("recipe", "recipe_name", "settings", "same", "fields"):
        assert one.info.get(name) == two.info.get(name), name
    assert (tmp_path / "a/config.toml").read_bytes() == (tmp_path / "b/config.toml").read_bytes()


def test_weights_and_how_they_are_loaded(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    with_a_head(tiny(), tmp_path / "w.safetensors")
    monkeypatch.chdir(tmp_path)
    options = ["--from", "w.safetensors", "--mean", "0.25", "--image-size", "16", "--steps", "2", "--warmup", "0"]
    code, _, err = command(monkeypatch, capsys, "digits", *options, *MACHINE, "--out", "a")
    assert code == 0, err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = command(monkeypatch, capsys, "--config", tmp_path / "a/config.toml", "--out", "b", "--no-report")
    assert code == 0, err
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "elsewhere/b")
    assert RunFolder.open("b").info["input_spec"]["mean"] == [0.25]


def test_a_recipe_and_a_model_from_python(tmp_path: Path) -> None:
    import vitkit as package

    recipe = tiny(steps=3, warmup=0, mix=Mix(cutmix=1.0), betas=(0.8, 0.9))
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    run(tmp_path / "a", recipe, model=config)
    values = tomllib.loads((tmp_path / "a/config.toml").read_text(encoding="utf-8"))
    assert (values["recipe"]["mix"]["cutmix"], values["model"]["num_hidden_layers"]) == (1.0, 1)
    package.train(out=tmp_path / "b", **values, report=False, progress=False)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_the_command_line_wins(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "run.toml").write_text(
        'data = "digits"\nrecipe = "digits"\nbatch-size = 16\nepochs = 9\nlr = 1e-3\nwarmup = 0\ntracker = ["none"]\n'
        'device = "cpu"\nworkers = 0\nreport = false\naccumulate = 4\n[augment]\nscale = [0.5, 1.0]\n'
        "[set]\nhidden_size = 32\n",
        encoding="utf-8",
    )
    how = ["--steps", "2", "--lr", "0.002", "--micro-batch", "2", "--out", tmp_path / "r"]
    code, _, err = command(monkeypatch, capsys, "--config", tmp_path / "run.toml", *how)
    assert code == 0, err
    info = RunFolder.open(tmp_path / "r").info
    recipe = Recipe.from_dict(info["recipe"])
    assert (recipe.steps, recipe.epochs, recipe.lr, recipe.batch_size) == (2, None, 0.002, 16)
    assert recipe.augment == dataclasses.replace(RECIPES["digits"].augment, scale=(0.5, 1.0))
    assert info["settings"]["micro_batch"] == 2
    assert info["settings"]["trackers"] == []
    assert info["same"]["config"]["hidden_size"] == 32
    assert not (tmp_path / "r/report.html").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batchsize = 3", ["`vitkit train` has no option 'batchsize', did you mean 'batch_size'?"]),
        ("[augment]\nscales = [1, 1]", ["augment has no field 'scales', did you mean 'scale'?"]),
        ('epochs = "many"', ["epochs", "many"]),
        ("compile = 3", ["compile"]),
        ('lr = "fast"', ["lr", "fast"]),
        ("recipe = 'nothing'", ["Unknown recipe 'nothing'"]),
        ("lr = = 3", ["is not valid TOML"]),
        ("loading = 3", ["loading must be a table"]),
        ("[recipe]\nlrr = 3", ["A recipe has no field 'lrr'"]),
        ("[recipe]\nlr = 3", ["A recipe needs source, batch_size"]),
    ],
)
def test_mistakes_are_one_sentence(text: str, words: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    recipe = [] if "[recipe]" in text or "recipe =" in text else ["--recipe", "digits"]
    code, _, err = command(
        monkeypatch, capsys, "digits", *recipe, "--config", tmp_path / "run.toml", "--out", tmp_path / "r"
    )
    assert code == 2
    assert len(err.strip().splitlines()) == 1, err
    for word in words:
        assert word in err
    assert not (tmp_path / "r").exists()


def test_a_missing_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    code, _, err = command(monkeypatch, capsys, "--config", tmp_path / "no.toml", "--out", tmp_path / "r")
    assert code == 2
    assert "cannot be read: No such file" in err


def info_of(recipe: Recipe, name: str = "custom", **more: Any) -> dict[str, Any]:
    settings = Settings(**SETTINGS).to_dict()
    data = {"spec": "digits", "path": None}
    same = {"config": CONFIG.to_dict()}
    base = {"recipe_name": name, "recipe": recipe.to_dict(), "settings": settings, "model": None, "weights": None}
    return {**base, "data": data, "same": same, **more}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_comes_back(name: str) -> None:
    for recipe in (
        RECIPES[name],
        RECIPES[name].change(batch_size=8, lr_rule="linear", final_lr=0.0, steps=7, warmup=0),
    ):
        for label in (name, "custom"):
            values = tomllib.loads(as_toml(info_of(recipe, label)))
            back = values.pop("recipe")
            assert (back == name) == (label == name)
            changes = {
                key: value for key, value in values.items() if key in {f.name for f in dataclasses.fields(Recipe)}
            }
            found = RECIPES[back].change(**changes) if isinstance(back, str) else Recipe.from_dict(back)
            assert found == recipe
    assert set(repeat(info_of(RECIPES[name], name))) <= {"data", "recipe", *FIELDS, *OPTIONS}


def test_toml_holds_what_names_can() -> None:
    values = {"a": 'ä"\\\n\x7f\U0001f600', "b": [1, 2.5e-9, True], "t": {"x": [], "u": {"y": "z"}}}
    assert tomllib.loads("\n".join(toml_lines(values))) == values
