"""The model card, and what goes to the hub: complete, loadable by others, and nothing of this machine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import vitkit
from tests.features.samples import photos, tiny
from tests.peers import peer
from vitkit.checkpoints import hub
from vitkit.cli import app
from vitkit.errors import HubError
from vitkit.jobs.share import bundle


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("share")
    photos(root / "set", {"train": 8, "test": 4}, {"red": (210, 40, 40), "<b>|blue": (40, 60, 200)})
    vitkit.probe(tiny(hidden_dropout_prob=0.0), root / "set", root / "run", cache=root / "cache", workers=0, accept=0.9)
    return root


def test_the_card_says_what_is_needed(place):
    run = CliRunner().invoke(app, ["card", str(place / "run"), "--licence", "cc-by-4.0"])
    assert run.exit_code == 0
    text = (place / "run/README.md").read_text(encoding="utf-8")
    _, front, body = text.split("---\n", 2)
    values = yaml.safe_load(front)
    found = json.loads((place / "run/evaluation.json").read_text(encoding="utf-8"))
    assert values["license"] == "cc-by-4.0"
    assert values["pipeline_tag"] == "image-classification"
    assert values["model-index"][0]["results"][0]["metrics"] == [{"type": "accuracy", "value": round(found["top1"], 4)}]
    assert f"| top-1 accuracy | {found['top1']:.1%} | {found['ci95'][0]:.1%} to {found['ci95'][1]:.1%} |" in body
    assert "16 training images from `set`, 2 classes" in body
    assert r"\<b\>\|blue (8)" in body  # a class name is not markup
    assert "accept 90% of images" in body
    assert "mean 0.5, 0.5, 0.5" in body
    assert str(place) not in text  # no path of this machine


def test_results_are_under_the_data_that_was_evaluated(place, tmp_path):
    """The run was fitted to `set` and is evaluated on `other`: the numbers are those of `other`."""
    shutil.copytree(place / "run", tmp_path / "run")
    for name, counts, words in (
        ("other", {"train": 2, "test": 3}, "the test part of other"),
        ("plain", {"": 3}, "plain"),
    ):
        photos(tmp_path / name, counts, {"red": (210, 40, 40), "<b>|blue": (40, 60, 200)})
        run = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), str(tmp_path / name), "--workers", "0"])
        assert run.exit_code == 0, run.output
        text = vitkit.card(tmp_path / "run").read_text(encoding="utf-8")
        _, front, body = text.split("---\n", 2)
        assert yaml.safe_load(front)["model-index"][0]["results"][0]["dataset"]["name"] == name
        assert "16 training images from `set`" in body
        assert f"On 6 images ({words}):" in body
        assert str(tmp_path) not in text
        assert f"of 6 images of {words} are" in (tmp_path / "run/report.html").read_text(encoding="utf-8")


def test_a_run_without_results_says_so(place, tmp_path):
    (place / "run/evaluation.json").rename(tmp_path / "kept")
    try:
        text = vitkit.card(place / "run", tmp_path / "card.md").read_text(encoding="utf-8")
    finally:
        (tmp_path / "kept").rename(place / "run/evaluation.json")
    assert "Not evaluated. Run `vitkit eval`" in text
    assert "model-index" not in text


def test_what_is_sent_is_loaded_by_vitkit_and_transformers(place, tmp_path):
    transformers = peer("transformers")
    files = bundle(place / "run", tmp_path / "sent", name="jane/food")
    assert set(files) == {
        "README.md", "config.json", "model.safetensors", "preprocessor_config.json", "vitkit.safetensors",
    }  # fmt: skip
    model, pixels = vitkit.load(place / "run"), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(pixels)
        assert torch.allclose(vitkit.load(tmp_path / "sent")(pixels), expected, atol=1e-6)
        theirs = transformers.ViTForImageClassification.from_pretrained(tmp_path / "sent").eval()
        assert torch.allclose(theirs(pixels).logits, expected, atol=1e-5)
    assert theirs.config.id2label == dict(enumerate(model.input_spec.class_names))
    assert vitkit.load(tmp_path / "sent/vitkit.safetensors").known is not None
    for file in (tmp_path / "sent").iterdir():
        assert str(place).encode() not in file.read_bytes(), file.name


def test_the_blocks_of_the_card_run(place, tmp_path, monkeypatch):
    peer("transformers")
    bundle(place / "run", tmp_path / "sent", name="jane/food")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.jpg").write_bytes((place / "set/test/red/0.png").read_bytes())
    text = (tmp_path / "sent/README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 2  # this tiny model is none of timm's
    for block in blocks:
        exec(block.replace("jane/food", str(tmp_path / "sent")), {})


def test_a_published_variant_is_loaded_by_timm(tmp_path, monkeypatch):
    timm = peer("timm")
    photos(tmp_path / "set", {"train": 3, "test": 2})
    backbone = vitkit.create("vit-ti/16", image_size=32, num_classes=0)
    run = vitkit.probe(backbone, tmp_path / "set", tmp_path / "run", methods=["ridge"], cache=tmp_path, workers=0)
    monkeypatch.chdir(tmp_path)
    bundle(run.run.path, tmp_path / "sent", name="jane/food")
    text = (tmp_path / "sent/README.md").read_text(encoding="utf-8")
    assert "vitkit convert jane/food model.pth --to timm" in text
    assert CliRunner().invoke(app, ["convert", "sent", "model.pth", "--to", "timm"]).exit_code == 0
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(import timm.*?)```", text, re.S)[0], names)
    assert timm is names["timm"]
    pixels = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(names["model"].eval()(pixels), run.model(pixels), atol=1e-5)  # type: ignore[attr-defined]


def test_a_dry_run_needs_no_network(place, monkeypatch):
    monkeypatch.setattr(hub, "upload", lambda *a, **k: pytest.fail("sent"))
    run = CliRunner().invoke(app, ["push", str(place / "run"), "jane/food", "--dry-run"])
    assert run.exit_code == 0
    assert run.stdout.startswith("would send to jane/food:\n  README.md")
    assert "model.safetensors" in run.stdout


@pytest.mark.parametrize(
    "name", ["food", "jane/food/more", "/food", "jane/", "jane/../x", "https://x.y/z", "a/" + "b" * 99]
)
def test_a_name_that_the_hub_does_not_take(place, name):
    with pytest.raises(HubError, match="Expected owner/name"):
        vitkit.push(place / "run", name, dry_run=True)


def test_offline_it_says_so_and_sends_nothing(place, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="offline mode is on"):
        vitkit.push(place / "run", "jane/food")


def test_it_is_sent_in_one_commit_with_the_hub_s_client(place, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    calls = []

    class Api:
        def create_repo(self, name, **how):
            calls.append((name, how))
            return f"https://huggingface.co/{name}"

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            calls.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir())))

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    sent = vitkit.push(place / "run", "jane/food", private=True)
    assert sent.url == "https://huggingface.co/jane/food"
    assert calls[0] == ("jane/food", {"private": True, "exist_ok": True, "repo_type": "model"})
    assert calls[1] == ("jane/food", sorted(sent.files))


def test_a_refusal_says_how_to_log_in(place, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    class Response:
        status_code = 401
        headers: dict[str, str] = {}
        request = None

    class Api:
        def create_repo(self, name, **how):
            error = HfHubHTTPError.__new__(HfHubHTTPError)
            Exception.__init__(error, "401 Client Error: Unauthorized")
            error.response = Response()
            raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(HubError, match="hf auth login"):
        vitkit.push(place / "run", "jane/food")


def test_a_lost_network_is_said_in_a_sentence(place, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError

    class NoConnection(HTTPError):
        """As the client's library raises it: no OSError."""

        def __init__(self) -> None:
            Exception.__init__(self, "Temporary failure in name resolution")

    class Api:
        def create_repo(self, name, **how):
            raise NoConnection

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(HubError, match=r"jane/food could not be sent to the hub \(NoConnection: Temporary failure"):
        vitkit.push(place / "run", "jane/food")
