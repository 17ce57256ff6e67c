"""examples/foodvision.md: its commands run, and its table says what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.features.test_commands import call

PAGE = Path(__file__).parents[2] / "examples" / "foodvision.md"


def commands() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    return [
        shlex.split(line)[1:]
        for block in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)
        for line in block.splitlines()
    ]


def test_the_page_has_its_commands() -> None:
    assert [words[0] for words in commands()] == ["train", "train", "probe", "eval", "eval", "eval", "predict"]


@pytest.mark.slow
def test_the_commands_run_and_the_table_is_true(shared_data, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    data = shared_data / "pizza_steak_sushi"
    here = {
        "food": f"food:{data}",
        "photo.jpg": str(next((data / "test" / "sushi").iterdir())),
        "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k": str(
            shared_data / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth"
        ),
    }
    said = ""
    for words in commands():
        line = [here.get(word, word) for word in words] + ([] if words[0] == "predict" else ["--workers", "0"])
        if "runs/food-scratch" not in words:
            said += call(*line).stdout
        elif words[0] == "train":
            call(*line, "--dry-run")  # all of it takes minutes
    page = PAGE.read_text(encoding="utf-8")
    (tuned,) = re.findall(r"^runs/food-finetuned .*\ntop-1 .*\((\d+) of 75\)$", said, re.M)
    assert 70 <= int(tuned) <= 73  # another CPU rounds otherwise
    assert "71, 72 and 71 of 75" in page
    assert re.search(r"logistic +0\.9733 +73 of 75", said)
    assert "73 of 75, 97.3%" in page
    for method in ("ridge", "knn"):
        assert re.search(method + r" +0\.9600 +72 of 75", said)
    shots = [f"{float(share) * 100:.1f}" for share in re.findall(r"images? per class: (0\.\d+)", said)]
    assert " / ".join(reversed(shots)) in page
    assert "sushi" in said.splitlines()[-1]
