"""What commands write: names are checked before the work, and nothing is replaced that cannot be made again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import vitkit
from tests.features.samples import photos, saved
from vitkit.cli import main

Run = tuple[int, str, str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, photos, and a run."""
    root = tmp_path_factory.mktemp("outputs")
    photos(root / "set", {"train": 4, "test": 2})
    saved(root)
    vitkit.probe(root / "tiny.safetensors", root / "set", root / "run", cache=root / "cache", workers=0)
    return root


@pytest.fixture
def call(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A function that runs a command in an empty folder; RUN, DATA, PHOTO and WEIGHTS are those of `place`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITKIT_CACHE", str(place / "cache"))
    names = {"RUN": "run", "DATA": "set", "PHOTO": "set/test/red/0.png", "WEIGHTS": "tiny.safetensors"}

    def run(words: str) -> Run:
        given = (str(place / names[word]) if word in names else word for word in words.split())
        monkeypatch.setattr(sys, "argv", ["vitkit", *given])
        with pytest.raises(SystemExit) as done:
            main()
        out, err = capsys.readouterr()
        return int(done.value.code or 0), out, err

    return run


def refused(run: Run, *words: str) -> None:
    """Check that a command ended with one sentence, before it had done anything that shows."""
    code, out, err = run
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("predict RUN PHOTO --out a.xlsx", "--out must end in .csv; got 'a.xlsx'."),
        ("predict RUN PHOTO --out folder", "--out must end in .csv; got 'folder'."),
        ("predict RUN PHOTO --out folder.csv", "Could not write to folder.csv: it is a folder."),
        ("predict RUN PHOTO --out file/a.csv", "Could not write to file/a.csv: part of the path is a file"),
        ("predict RUN PHOTO --out a.csv --json", "Expected --out or --json; got both."),
        ("suggest RUN DATA --out a.txt", "--out must end in .csv; got 'a.txt'."),
        ("search DATA PHOTO --from WEIGHTS --export .", "--export must end in .csv or .parquet; got '.'."),
        ("search DATA PHOTO --from WEIGHTS --export file/a.csv", "Could not write to file/a.csv:"),
        ("report RUN --out photo.jpg", "--out must end in .html or .htm; got 'photo.jpg'."),
        ("card RUN --out photo.jpg", "--out must end in .md; got 'photo.jpg'."),
        ("doctor DATA --page photo.jpg", "--page must end in .html or .htm; got 'photo.jpg'."),
        ("doctor DATA --page folder.html", "Could not write to folder.html: it is a folder."),
        ("report RUN --out folder.html", "Could not write to folder.html: it is a folder."),
        ("report RUN --out file/a.html", "Could not write to file/a.html: part of the path is a file"),
        ("runs . --html photo.jpg", "--html must end in .html or .htm; got 'photo.jpg'."),
        ("embed DATA --from WEIGHTS --out .", "ends in .npz or .parquet; got '.'."),
        ("embed DATA --from WEIGHTS --out file/a.npz", "Could not write to file/a.npz:"),
    ],
)
def test_a_name_that_cannot_be_written_is_said_as_it_was_given(call, words: str, says: str) -> None:  # type: ignore[no-untyped-def]
    Path("file").write_text("", encoding="utf-8")
    for folder in ("folder", "folder.csv", "folder.html"):
        Path(folder).mkdir()
    before = sorted(Path().rglob("*"))
    refused(call(words), says)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_a_folder_in_which_nothing_can_be_made(call) -> None:  # type: ignore[no-untyped-def]
    refused(call("predict RUN PHOTO --out /proc/x.csv"), "Could not write to /proc/x.csv: nothing can be created")


def test_suggest_keeps_the_labels_that_were_filled_in(call, place: Path) -> None:  # type: ignore[no-untyped-def]
    words = "suggest RUN DATA --count 3 --workers 0 --out to-label.csv"
    out = Path("to-label.csv")
    assert call(words)[0] == 0
    empty = out.read_text(encoding="utf-8")
    assert call(words)[0] == 0  # nothing is lost
    assert out.read_text(encoding="utf-8") == empty
    filled = empty.replace(",\n", ",red\n", 2)
    out.write_text(filled, encoding="utf-8")
    refused(call(words), "a list without labels to replace; to-label.csv has 2 labels filled in", "Give another name")
    assert out.read_text(encoding="utf-8") == filled
    out.write_text(filled.replace(",", ";"), encoding="utf-8-sig")  # as a spreadsheet may save it
    refused(call(words), "Expected a new file", "path;guess;margin;label")


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("predict RUN PHOTO --out table.csv", "image,class,index,probability,distance,error\n"),
        ("predict RUN PHOTO --out table.csv", "image,labels,probabilities,error\n"),
        (
            "search DATA PHOTO --from WEIGHTS --workers 0 --export table.csv",
            "query,rank,filepath,split,label,similarity\n",
        ),
        ("suggest RUN DATA --workers 0 --out table.csv", "path,guess,margin,label\n"),
    ],
)
def test_a_table_is_replaced_by_one_with_the_same_columns_only(call, words: str, own: str) -> None:  # type: ignore[no-untyped-def]
    table = Path("table.csv")
    for other, says in (
        ("name,price\ntea,3\n", "table.csv has the columns name, price"),
        ("\ufeffname;price\n", "table.csv has the columns name;price"),
        ("\udcff\udcd8", "table.csv is another kind of file"),
    ):
        table.write_text(other, encoding="utf-8", errors="surrogateescape")
        before = table.read_bytes()
        refused(call(words), "Expected a new file, or one with the columns", says, "delete it first")
        assert table.read_bytes() == before
    for replaceable in ("", own):
        table.write_text(replaceable, encoding="utf-8")
        assert call(words)[0] == 0
        assert len(table.read_text(encoding="utf-8").splitlines()) > 1


def test_features_replace_features_only(call) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("pyarrow")
    embed = "embed DATA --from WEIGHTS --workers 0 --out"
    for name in ("e.npz", "e.parquet"):
        assert call(f"{embed} {name}")[0] == 0
        assert call(f"{embed} {name}")[0] == 0
    vitkit.save(vitkit.create("vit-ti/16", num_hidden_layers=1, image_size=32, num_classes=2), "w.npz", "google")
    refused(call(f"{embed} w.npz"), "w.npz has the columns ", "delete it first")
    refused(call("search DATA PHOTO --from WEIGHTS --export e.parquet"), "e.parquet has the columns name, part")
    Path("junk.npz").write_bytes(b"junk")
    refused(call(f"{embed} junk.npz"), "junk.npz is another kind of file")


def test_convert_replaces_nothing(call) -> None:  # type: ignore[no-untyped-def]
    model = vitkit.create("vit-ti/16", num_hidden_layers=1, image_size=32, num_classes=2)
    vitkit.save(model, "own.safetensors")
    vitkit.save(model, "hf", "huggingface")
    Path("link.safetensors").symlink_to("own.safetensors")
    Path("notes.npz").write_bytes(b"not weights")
    before = {file: file.read_bytes() for file in Path().rglob("*") if file.is_file()}
    for words, said in (
        ("own.safetensors own.safetensors", "own.safetensors exists"),
        ("own.safetensors ../{here}/own.safetensors", "own.safetensors exists"),
        ("own.safetensors link.safetensors", "link.safetensors exists"),
        ("hf hf --to huggingface", "Expected a new folder to write; hf/model.safetensors exists"),
        ("RUN notes.npz --to google", "Expected a new file to write; notes.npz exists. Choose another name"),
        ("own.safetensors notes.npz/x.npz --to google", "notes.npz/x.npz: part of the path is a file"),
        ("nowhere.safetensors a.npz --to timm", "Expected a file ending in .pth"),  # before the weights are read
    ):
        refused(call("convert " + words.format(here=Path().absolute().name)), said)
    assert {file: file.read_bytes() for file in Path().rglob("*") if file.is_file()} == before
    assert call("convert own.safetensors new.npz --to google")[0] == 0
    Path("empty").mkdir()
    assert call("convert own.safetensors empty --to huggingface")[0] == 0


def test_a_card_that_was_edited_is_kept(call, place: Path) -> None:  # type: ignore[no-untyped-def]
    card = place / "run/README.md"
    assert call("card RUN")[0] == 0
    assert call("card RUN --licence mit")[0] == 0  # our own may be replaced, also by another one
    assert "license" in card.read_text(encoding="utf-8")
    card.write_bytes(card.read_bytes().replace(b"\n", b"\r\n"))  # as git may check it out on Windows
    assert call("card RUN")[0] == 0
    plain = card.read_text(encoding="utf-8")
    for edited in (plain + "MY NOTES\n", plain.replace("## Data", "## My data"), "MY NOTES\n"):
        card.write_text(edited, encoding="utf-8")
        refused(call("card RUN"), "README.md was edited or written by hand", "with --out")
        assert card.read_text(encoding="utf-8") == edited
    assert call("card RUN --out new.md")[0] == 0
    assert Path("new.md").read_text(encoding="utf-8") == plain
    card.unlink()


@pytest.mark.parametrize("command", ["walk", "patches"])
def test_pictures_of_other_weights_are_kept(call, command: str) -> None:  # type: ignore[no-untyped-def]
    assert call(f"{command} --from WEIGHTS")[0] == 0
    kept = {file: file.read_bytes() for file in Path(command).iterdir()}
    code, out, _ = call(f"{command} --model vit-ti/16")
    assert code == 0
    assert f"wrote {command}-2/" in out
    assert {file: file.read_bytes() for file in Path(command).iterdir()} == kept
    assert call(f"{command} --from WEIGHTS --out {command}")[0] == 0  # a folder that is named is used


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("doctor DATA --from nope.pth", "There is no file or folder 'nope.pth'"),
        ("explore --from WEIGHTS --build file", "Could not write to file: it is a file. Give the name of a folder."),
        ("explore --from WEIGHTS --build page", "Expected a new folder for the page; page has index.html already"),
        ("probe DATA --from WEIGHTS --out file/run", "Could not write to file/run: part of the path is a file"),
        ("explain RUN PHOTO --out file", "Could not write to file: it is a file"),
        ("figures RUN --out file", "Could not write to file: it is a file"),
        ("eval RUN DATA --out file", "Could not write to file: it is a file"),
        ("walk --out file", "Could not write to file: it is a file"),
        ("patches --out file", "Could not write to file: it is a file"),
        ("walk nope.jpg", "nope.jpg: cannot be read"),
        ("patches nope.jpg", "nope.jpg: cannot be read"),
    ],
)
def test_what_cannot_work_is_said_before_the_work(  # type: ignore[no-untyped-def]
    call, words: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitkit.jobs import explore, patches

    def work(*args: object, **how: object) -> None:
        raise AssertionError("it works first")

    monkeypatch.setattr(explore, "of_model", work)
    monkeypatch.setattr(patches, "model_for", work)
    Path("file").write_text("", encoding="utf-8")
    Path("page").mkdir()
    Path("page/index.html").write_text("mine", encoding="utf-8")
    code, out, err = call(words)
    assert (code, out) == (2, "")
    assert err.startswith("vitkit: ") and says in err and err.count("\n") == 1, err  # noqa: PT018
    assert sorted(map(str, Path().rglob("*"))) == ["file", "page", "page/index.html"]


@pytest.mark.parametrize("options", ["", " --registers", " --faithfulness"])
def test_explain_skips_what_it_cannot_read(call, place: Path, options: str) -> None:  # type: ignore[no-untyped-def]
    Path("mixed").mkdir()
    Path("mixed/a.jpg").write_bytes(b"no photo")
    Path("mixed/b.png").write_bytes((place / "set/test/red/0.png").read_bytes())
    code, out, err = call("explain RUN mixed --out looks" + options)
    assert code == 1
    assert "mixed/b.png: " in out
    assert Path("looks/b/overview.png").is_file()
    assert err.count("skipped mixed/a.jpg: not an image") == 1
    assert "vitkit: 1 of 2 images could not be read." in err
    code, out, err = call("explain RUN nowhere.jpg" + options)
    assert (code, "skipped nowhere.jpg: cannot be read" in err) == (1, True)


@pytest.mark.parametrize("command", ["walk", "patches"])
def test_of_several_photos_it_is_said_which_one_is_shown(call, place: Path, command: str) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = call(f"{command} {place / 'set/test/red'} --from WEIGHTS")
    assert code == 0
    assert f"Showing {place / 'set/test/red/0.png'}, the first of 2 photos" in out
    assert "Showing" not in call(f"{command} PHOTO --from WEIGHTS")[1]
