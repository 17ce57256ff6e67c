"""The report of a run: its contents, what it does when something is missing, and that it is self-contained."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.cli import app
from vitkit.errors import OutputError, UnreadableFile
from vitkit.explanations.plots import PLOTS
from vitkit.jobs.report import _affordable, _link, compare, report, try_report
from vitkit.model.config import VARIANTS
from vitkit.reports.compare import differences
from vitkit.reports.page import CAPTIONS, ELSEWHERE, cards, command, counts, in_corners
from vitkit.reports.render import data_name, date, duration, images_of, millions, number, prose, share, thumbnail, whole
from vitkit.reports.results import CAPTIONS as RESULTS
from vitkit.reports.results import confused, confuses, how_sure, merged, results, verdict
from vitkit.training.run_folder import RunFolder


class Reader(HTMLParser):
    """Collect the text, image sources, ids and links of a page, and check that every tag is closed."""

    VOID = {"meta", "link", "img", "br", "path", "use", "image", "rect"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words, self.sources, self.ids, self.links, self.open = "", [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.sources += [found[key] for key in ("src", "xlink:href") if key in found]
        self.links += [found["href"]] if tag == "a" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + " "


def test_everything_is_on_the_page(digits_page: Path, digits: Path) -> None:
    assert digits_page == digits / "report.html"
    page = Reader(digits_page.read_text(encoding="utf-8"))
    for section in ("repeat", "data", "curves", "results", "wrong", "figures"):
        assert section in page.ids, section
        assert f"#{section}" in page.links
    for words in (
        "Confusion matrix",
        "Reliability",
        "Learning rate",
        "Throughput",
        "training images",
        "macro F1",
        "the validation split",
        "Results per class",
        "Most frequent confusions",
        "fingerprint",
    ):
        assert words in page.words, words
    for name, plot in PLOTS.items():
        shown = plot.needs != "image" and name not in ELSEWHERE
        assert (plot.title in page.words) == shown, plot.title
        assert (plot.caption in page.words) == shown, plot.title
    assert all(caption in page.words for caption in (CAPTIONS | RESULTS).values())
    order = [section for section in page.ids if f"#{section}" in page.links]
    assert order == ["results", "wrong", "curves", "data", "figures", "repeat"]  # results first
    assert len(page.ids) == len(set(page.ids))
    assert len([s for s in page.sources if s.startswith("data:image/")]) > 60


def test_nothing_comes_from_elsewhere(digits_page: Path) -> None:
    text = digits_page.read_text(encoding="utf-8")
    page = Reader(text)
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    assert all(link.startswith("#") for link in page.links)
    assert not re.findall(r"url\((?!#)", text)
    assert "<script" not in text


def test_numbers_are_those_of_the_evaluation(food: Path, photos: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(food, run)
    (run / "report.html").unlink(missing_ok=True)
    app(["eval", str(run), str(photos), "--workers", "0", "--no-report"], standalone_mode=False)
    assert not (run / "report.html").exists()
    app(["eval", str(run), str(photos), "--workers", "0"], standalone_mode=False)
    found = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    page = Reader((run / "report.html").read_text(encoding="utf-8"))
    assert f"{found['top1']:.2%}" in page.words
    assert f"{found['nll']:.4f}" in page.words
    assert found["part"] in page.words
    for row in found["worst"]:
        assert row["image"] in page.words


def test_names_are_escaped(food_page: Path) -> None:
    text = food_page.read_text(encoding="utf-8")
    assert "<b>red" not in text
    assert '<b>red & "blue"' in Reader(text).words
    assert "grün" in text


def test_what_is_gone_is_said(food: Path, photos: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(food, run)
    info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    info["data"] |= {"spec": str(tmp_path / "nowhere"), "path": f"folder:{tmp_path / 'nowhere'}"}
    (run / "run.json").write_text(json.dumps(info), encoding="utf-8")
    for file in run.glob("*.safetensors"):
        file.unlink()
    page = Reader(report(run).read_text(encoding="utf-8"))
    for words in ("The images cannot be found any more", "The weights cannot be read", "No results"):
        assert words in page.words
    assert "figures" not in page.ids
    assert "curves" in page.ids


def test_a_torn_line_and_no_metrics_do_no_harm(food: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(food, run)
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"event": "tr')
    for file in run.glob("*.safetensors"):  # without figures it is quick
        file.unlink()
    assert "curves" in Reader(report(run).read_text(encoding="utf-8")).ids
    (run / "metrics.jsonl").unlink()
    (run / "evaluation.json").write_text("[1", encoding="utf-8")
    assert "curves" not in Reader(report(run, out=tmp_path / "x" / "other.html").read_text(encoding="utf-8")).ids
    assert (tmp_path / "x" / "other.html").is_file()


def test_a_probe(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vitkit import create, save

    weights = tmp_path / "w.safetensors"
    save(create("vit-ti/16", num_hidden_layers=1, num_classes=0, image_size=32, patch_size=8), weights)
    app(
        [
            "probe",
            str(photos),
            "--from",
            str(weights),
            "--out",
            str(tmp_path / "run"),
            "--workers",
            "0",
            "--cache",
            str(tmp_path / "cache"),
            "--method",
            "ridge",
        ],
        standalone_mode=False,
    )
    assert f"report: {tmp_path / 'run' / 'report.html'}" in capsys.readouterr().out
    page = Reader((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    assert "newer than" not in page.words
    files = {name: tmp_path / "run" / name for name in ("evaluation.json", "best.safetensors")}
    assert files["evaluation.json"].stat().st_mtime_ns >= files["best.safetensors"].stat().st_mtime_ns
    assert json.loads(files["evaluation.json"].read_text(encoding="utf-8"))["weights"] == str(tmp_path / "run")
    assert f"with the weights {tmp_path / 'run'}" in " ".join(page.words.split())
    assert f"pre-trained weights {weights}" in " ".join(page.words.split())
    assert "ridge" in page.words
    assert "the val part" in page.words
    assert "curves" not in page.ids


def test_mistakes(tmp_path: Path, food: Path) -> None:
    with pytest.raises(UnreadableFile, match=r"run\.json"):
        report(tmp_path)
    assert try_report(tmp_path).startswith("no report was written: Expected a run folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file"):
        report(food, out=tmp_path / "file" / "report.html")
    with pytest.raises(UnreadableFile, match="found none"):
        compare(tmp_path)


def test_compare(digits_page: Path, food: Path, folder: Path, tmp_path: Path) -> None:
    page = Reader(compare(folder).read_text(encoding="utf-8"))
    assert "digits/report.html" in page.links
    assert "Validation accuracy" in page.words
    assert "recipe.batch_size" in page.words
    assert "deep/food" in page.words
    assert "recipe.decay" not in page.words  # the same in both
    app(["runs", str(folder), "--html", str(tmp_path / "x.html")], standalone_mode=False)
    assert (tmp_path / "x.html").is_file()
    assert _link(tmp_path / "a #1%" / "report.html", tmp_path / "b") == "../a%20%231%25/report.html"


def test_the_command_can_be_typed_again() -> None:
    argv = ["/usr/bin/vitkit", "train", "my photos", "--out", "x"]
    assert command({"environment": {"command": argv}}) == "vitkit train 'my photos' --out x"
    assert command({"environment": {"command": ["vitkit.exe", "demo"]}}) == "vitkit demo"
    assert command({"environment": {"command": ["script.py"]}}) == ""
    assert command({}) == ""


def test_numbers_as_people_read_them() -> None:
    seconds = (None, 3.04, 119.9, 120, 600, 7199, 7200)
    assert [duration(s) for s in seconds] == ["–", "3.0 s", "119.9 s", "2.0 min", "10.0 min", "120.0 min", "2.0 h"]
    assert [share(s) for s in (None, 0, 0.1234, 1)] == ["–", "0.0%", "12.3%", "100.0%"]
    assert [number(s) for s in (None, 12.3456, 1234567)] == ["–", "12.35", "1.235e+06"]
    sizes = (7, 152_202, 5_524_995, 85_800_963, 304_326_632, 1_843_000_000)
    assert [millions(n) for n in sizes] == [
        "7",
        "152,202",
        "5.52 million",
        "85.8 million",
        "304 million",
        "1.84 billion",
    ]
    assert [whole(s) for s in (None, 12.6, 1234567)] == ["–", "13", "1,234,567"]
    assert [date(s) for s in (None, "2026-11-15T23:07:54+02:00")] == ["–", "2026-11-15 21:07 UTC"]


def test_the_cards_on_top() -> None:
    time = {"images_per_second": 100.0, "seconds": 30.0, "waiting": 0.1}
    metrics = [
        {"event": "train", "step": 500, "loss": 2.0, "time": time},
        {"event": "val", "step": 500, "top1": 0.75},
        {
            "event": "train",
            "step": 1000,
            "loss": 0.51234,
            "time": {**time, "images_per_second": 2000.0, "waiting": 0.3},
        },
        {"event": "val", "step": 1000, "top1": 0.5},
    ]
    info = {"steps": 1200, "parameters": 85_800_963, "trained": 2307}
    training = [
        ("training loss", "0.512", "step 1,000 of 1,200"),
        ("throughput", "1,050", "images per second (median)"),
        ("training time", "60.0 s", "20% of it waiting for data"),
        ("parameters", "85.8 million", "2,307 trained, the rest frozen"),
    ]
    assert cards(info, metrics, None) == [("best top-1 accuracy", "75.0%", "on the validation split"), *training]
    found = {"top1": 0.876, "ci95": [0.8, 0.9251], "part": "the test split", "top5": 0.99, "n": 1234, "seconds": 5.0}
    assert cards(info, metrics, {**found, "per_class": [{}] * 5}) == training
    assert cards({"parameters": 7, "trained": 7}, [], {**found, "per_class": [{}] * 6}) == [
        ("top-5 accuracy", "99.0%", "the true class is among the five most probable"),
        ("time", "5.0 s", "without imports"),
        ("parameters", "7", "all of them trained"),
    ]


FOUND = {
    "top1": 0.876,
    "ci95": [0.8, 0.9251],
    "part": "the test split",
    "n": 1234,
    "per_class": [{"name": "pizza", "support": 25}],
    "confused": [["pizza", "steak", 3], ["steak", "pizza", 1]],
    "reliability": [
        {"confidence": 0.55, "accuracy": 0.5, "count": 4},
        {"confidence": 0.95, "accuracy": 0.9, "count": 10},
    ],
}


def test_the_headline() -> None:
    found = FOUND
    said = verdict(found)
    assert said["accuracy"] == "87.6%"
    assert said["says"] == "1,081 of 1,234 images of the test split are classified correctly."
    assert said["means"] == "On other images of this kind, expect 80.0% to 92.5% (95% confidence interval)."
    assert dict(said["facts"])["What it confuses"] == "pizza taken for steak: 3 of 25 images."
    both = confuses(found | {"confused": [["pizza", "steak", 3], ["steak", "sushi", 3], ["sushi", "pizza", 3]]})
    assert both == "pizza taken for steak: 3 of 25 images. steak taken for sushi: 3 images."
    assert dict(said["facts"])["How sure to be"] == (
        "When it is at least 90% sure, it is right on 9 of 10 images. "
        "When it is less sure, it is right on 2 of 4 images."
    )
    assert how_sure(found["reliability"][:1]) == "It is never 90% sure; it is right on 2 of 4 images."
    assert (
        dict(verdict({**found, "confused": []})["facts"])["What it confuses"]
        == "It confuses no classes on these images."
    )


def test_the_evaluated_images_are_named() -> None:
    specs = ("folder:/home/jo/B/", "/home/jo/labels.csv", "hf:jo/food", "digits", "digits:")
    assert [data_name(spec) for spec in specs] == ["B", "labels.csv", "food", "digits", "digits"]
    assert [data_name(spec) for spec in ("", ".", "..")] == ["", "", ""]  # no name to tell
    for part, words in {
        "the test part": "the test part of B",
        "the 20% that the run held out": "the 20% that the run held out of B",
        "all images": "B",
        "all images, which the run was fitted to": "B, which the run was fitted to",
    }.items():
        assert images_of({"part": part, "data": "x/B"}) == words
        assert images_of({"part": part}) == images_of({"part": part, "data": "."}) == part
    assert verdict(FOUND | {"data": "/home/jo/B"})["says"] == (
        "1,081 of 1,234 images of the test split of B are classified correctly."
    )


def test_points_of_the_reliability_diagram_stand_for_enough_images() -> None:
    bins = [
        {"confidence": c, "accuracy": a, "count": n}
        for c, a, n in ((0.4, 1.0, 2), (0.5, 0.0, 0), (0.6, 0.5, 8), (0.8, 1.0, 20), (0.9, 0.5, 4))
    ]
    points = merged(bins)
    assert [n for _, _, n in points] == [10, 24]
    assert points[0][:2] == pytest.approx((0.56, 0.6))
    assert points[1][:2] == pytest.approx(((0.8 * 20 + 0.9 * 4) / 24, 22 / 24))
    assert merged(bins[:1]) == [(0.4, 1.0, 2)]  # all there is
    assert merged([]) == []


def test_bright_corners_are_explained() -> None:
    maps = np.zeros((3, 14, 14), np.float32)
    maps[0, 0, 13] = maps[1, 7, 7] = maps[2, 12, 1] = 1
    assert "In 2 of 3 images the brightest patch lies in a corner" in in_corners(maps)
    maps[0, 0, 13], maps[0, 0, 7] = 0, 1  # an edge is not a corner
    maps[2] = maps[1]
    assert in_corners(maps) == ""
    assert in_corners(maps[:, :4, :4]) == ""  # in a small grid nearly everything is near a corner


def test_images_are_shrunk_or_kept() -> None:
    large, tiny = Image.new("RGB", (300, 200)), Image.new("L", (8, 63), 7)
    with Image.open(io.BytesIO(base64.b64decode(thumbnail(large).partition(",")[2]))) as image:
        assert (image.format, image.size) == ("JPEG", (128, 85))
    with Image.open(io.BytesIO(base64.b64decode(thumbnail(tiny).partition(",")[2]))) as image:
        assert (image.format, image.size, image.getpixel((0, 0))) == ("PNG", (8, 63), (7, 7, 7))


def test_a_difference_needs_two_values(tmp_path: Path) -> None:
    runs = [
        RunFolder(tmp_path, {"recipe": {"lr": 0.1, "decay": "cosine", "source": name}, "model": "vit-ti/16"} | more)
        for name, more in (("a", {"processes": 2}), ("b", {}))
    ]
    runs[1].info["recipe"]["lr"] = 0.2
    assert differences(runs) == [("recipe.lr", ["0.1", "0.2"])]


def test_results_of_an_evaluation() -> None:
    found = {
        "n": 1234,
        "top1": 0.5,
        "top5": 0.75,
        "ci95": [0.25, 0.625],
        "nll": 1.5,
        "ece": 0.0625,
        "macro_f1": 0.375,
        "seconds": 2.5,
        "skipped": [{}],
        "reliability": [{"confidence": 0.5, "accuracy": 0.5, "count": 3}],
        "per_class": [{"name": name} for name in "abcdef"],
        "confusion": np.eye(6).tolist(),
    }
    shown = results(found)
    assert shown["table"] == [
        ("images", "1,234"),
        ("top-1 accuracy", "50.00%"),
        ("top-5 accuracy", "75.00%"),
        ("95% confidence interval of top-1", "25.00% to 62.50%"),
        ("negative log-likelihood", "1.5000"),
        ("expected calibration error (ECE)", "0.0625"),
        ("macro F1", "0.3750"),
        ("seconds", "2.50"),
        ("skipped images", "1"),
    ]
    assert "Reliability (expected calibration error 0.062)" in shown["drawn"][1][0]
    assert [caption for _, _, caption in shown["drawn"]] == list(RESULTS.values())
    few = results({**found, "per_class": found["per_class"][:3], "confusion": None})
    assert "top-5 accuracy" not in dict(few["table"])  # of three classes it is always right
    assert len(few["drawn"]) == 1


def test_a_confusion_shows_its_own_example() -> None:
    class Held:
        names = ("red", "blue")

        def read(self, i: int) -> tuple[Image.Image, int]:
            return Image.new("RGB", (8, 8), self.names[i]), 0

    rows = [{"image": "red", "truth": "b", "predicted": "a"}, {"image": "blue", "truth": "a", "predicted": "b"}]
    (pair, other) = confused({"confused": [["a", "b", 2], ["a", "c", 1]], "worst": rows}, Held())  # type: ignore[arg-type]
    assert (pair["truth"], pair["predicted"], pair["count"]) == ("a", "b", 2)
    assert pair["picture"] == thumbnail(Image.new("RGB", (8, 8), "blue"))
    assert other["picture"] is None
    assert counts({"data": {"counts": {"a": 10, "b": 5}}}) == [("a", 10, 1.0), ("b", 5, 0.5)]


def test_figures_cost_no_more_than_they_are_worth() -> None:
    def images(name: str, device: str = "cpu") -> int:
        model = torch.nn.Linear(1, 1, device=device)
        model.config = VARIANTS[name]
        return _affordable(model, 1e12, 4, 32)  # type: ignore[arg-type]

    assert [images(name) for name in ("vit-ti/16", "vit-b/16", "vit-l/16", "vit-g/14")] == [32, 28, 8, 4]
    assert images("vit-g/14", "meta") == 32


def test_words_in_backticks_are_code() -> None:
    assert prose("a < b, `c < d`.") == "a &lt; b, <code>c &lt; d</code>."
