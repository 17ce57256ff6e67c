"""The book: every chapter runs, its exercises have solutions that pass, and it is stored as it should be."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitkit.learn import EXERCISES, feedback

pytest.importorskip("nbclient", reason="needs pip install 'vitkit[book]'")
nbformat = pytest.importorskip("nbformat", reason="needs pip install 'vitkit[book]'")

ROOT = Path(__file__).parent.parent
BOOK = ROOT / "book"
TITLES = {
    "01-reading-the-paper": "Reading the paper",
    "02-images-to-tokens": "Eq. 1: from an image to tokens",
    "03-attention": "Attention",
    "04-the-mlp": "Eq. 3: the MLP",
    "05-the-whole-model": "The whole model, counted",
    "06-twelve-classes": "From five classes to twelve",
    "07-training-small": "Training small",
    "08-feature-extraction": "Feature extraction",
    "09-looking-inside": "Looking inside",
    "10-shipping-it": "Shipping it",
}
NEEDS_ONNX = {"10-shipping-it"}


def builder() -> Any:
    spec = importlib.util.spec_from_file_location("book_build", BOOK / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = builder()


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((BOOK / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in found]


def prose(name: str) -> str:
    return "\n\n".join(cell["source"] for cell in cells(name) if cell["cell_type"] == "markdown")


def solutions(name: str) -> dict[str, str]:
    """Name of an exercise -> the code of the solution that follows its cell."""
    found, asked = {}, ""
    for cell in cells(name):
        if cell["cell_type"] == "code" and (match := re.search(r'learn\.check\("([\w-]+)"', cell["source"])):
            asked = match[1]
        elif "<summary>A solution</summary>" in cell["source"]:
            found[asked] = re.search(r"```python\n(.*?)```", cell["source"], re.S)[1]  # type: ignore[index]
    return found


def test_the_chapters_are_those_of_the_table() -> None:
    assert [path.stem for path in build.CHAPTERS] == list(TITLES)
    for number, (name, title) in enumerate(TITLES.items(), start=1):
        assert prose(name).startswith(f"# {number}. {title}\n\nAfter this chapter you will be able to\n\n- ")
        assert "## Exercises" in prose(name)
        assert "## Questions to think about\n\n1. " in prose(name)


@pytest.mark.parametrize("name", TITLES)
def test_a_chapter_is_stored_for_review(name: str) -> None:
    raw = json.loads((BOOK / f"{name}.ipynb").read_text(encoding="utf-8"))
    nbformat.validate(raw)
    assert set(raw["metadata"]) == {"kernelspec", "language_info"}
    ids = [cell["id"] for cell in raw["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in raw["cells"]:
        assert cell.get("outputs", []) == [], f"cell {cell['id']} is stored with its output; clear it"
        assert cell.get("execution_count") is None
        assert set(cell["metadata"]) <= {"alt"}
        if cell["cell_type"] == "code":
            assert len(cell["source"]) <= 25, f"cell {cell['id']} is too long for a reader"


@pytest.mark.parametrize("name", TITLES)
def test_solutions_pass(name: str) -> None:
    asked = [
        match
        for cell in cells(name)
        if cell["cell_type"] == "code"
        for match in re.findall(r'learn\.check\("([\w-]+)"', cell["source"])
    ]
    found = solutions(name)
    assert asked == list(found)
    assert asked
    for exercise, code in found.items():
        names: dict[str, Any] = {"torch": torch, "nn": nn}
        exec(code, names)
        assert feedback(exercise, names[re.match(r"def (\w+)", code)[1]])  # type: ignore[index]


def test_every_exercise_is_in_one_chapter() -> None:
    found = [exercise for name in TITLES for exercise in solutions(name)]
    assert sorted(found) == sorted(EXERCISES)


@pytest.mark.parametrize("name", TITLES)
def test_links_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", prose(name))
    assert targets
    for target in targets:
        assert (BOOK / target).exists(), f"{name} links to {target}, which is not there"


@pytest.mark.parametrize("name", TITLES)
def test_a_chapter_runs_and_becomes_markdown(name: str, tmp_path: Path) -> None:
    if name in NEEDS_ONNX:
        pytest.importorskip("onnxscript", reason="needs pip install 'vitkit[book]'")
    text = read_and_build(name, tmp_path)
    pictures = re.findall(rf"!\[(.*?)\]\(({name}_files/[^)]+)\)", text)
    stored = [cell for cell in cells(name) if "alt" in cell["metadata"]]
    assert [alt for alt, _ in pictures] == [
        cell["metadata"]["alt"] for cell in stored
    ]  # each figure says what it shows
    for _, file in pictures:
        path = tmp_path / file
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert np.asarray(image.convert("L")).std() > 1, f"{file} is blank"
        else:
            assert path.read_text(encoding="utf-8").startswith("<svg")
    assert "not yet." in text  # the exercises answer


def read_and_build(name: str, out: Path) -> str:
    path: Path = build.markdown(build.run(BOOK / f"{name}.ipynb"), out, name)
    return path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["08-feature-extraction", "09-looking-inside"])
def test_with_real_weights_and_photos(
    name: str, tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITKIT_BOOK_WEIGHTS", str(next((shared_data / "weights").glob("*augreg*.pth"))))
    monkeypatch.setenv("VITKIT_BOOK_PHOTOS", str(shared_data / "pizza_steak_sushi"))
    text = read_and_build(name, tmp_path)
    if name.startswith("08"):
        assert int(re.search(r"logistic +(\d+) right", text)[1]) >= 71  # type: ignore[index]
    else:
        assert "(14, 14) patches, 12 layers" in text


def small(tmp_path: Path, *sources: str) -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    for i, cell in enumerate(notebook.cells):
        cell["id"] = f"c-{i}"
    nbformat.write(notebook, tmp_path / "small.ipynb")
    return tmp_path / "small.ipynb"


def test_a_cell_that_fails_fails_the_build(tmp_path: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    path = small(tmp_path, "x = 1", "assert x == 2, 'two and one are equal'")
    with pytest.raises(CellExecutionError, match="two and one are equal"):
        build.run(path)


def test_what_the_builder_writes(tmp_path: Path) -> None:
    path = small(
        tmp_path,
        "print('a')\nprint('\\x1b[1mb\\x1b[0m')",
        "import sys\nprint('hidden', file=sys.stderr)",
        "print('```')",
        "class Table:\n    def _repr_html_(self):\n        return '<table></table>'\nTable()",
    )
    notebook = build.run(path)
    links = "See [2](02-x.ipynb#a), [docs](../docs/learn.md), [3](x.ipynb)."
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(links))
    text = build.markdown(notebook, tmp_path / "out", "small", docs="../").read_text(encoding="utf-8")
    assert text.startswith("See [2](02-x.md#a), [docs](../learn.md), [3](x.ipynb).")
    assert "```text\na\nb\n```" in text
    assert "hidden'" in text
    assert "hidden\n" not in text  # what goes to stderr is left out
    assert "````text\n```\n````" in text
    assert "<table></table>" in text
    assert json.loads(path.read_text(encoding="utf-8"))["cells"][0]["outputs"] == []  # the source is not changed
