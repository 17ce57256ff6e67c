"""The command line as users run it: in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path

import pytest
import torch
import typer.main
from PIL import Image
from typer.core import TyperOption

from tests.conftest import Command
from vitkit import InputSpec, __version__, create, predict, save
from vitkit.cli import COMMANDS, app, main, text
from vitkit.cli.text import prepare

FROZEN = Path(__file__).with_name("command_line.json")


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}  # Python then reads and writes ASCII unless a file names its encoding


def command_line() -> dict[str, list[str]]:
    """{command: its arguments and options}."""
    group = typer.main.get_command(app)
    return {
        name: sorted("/".join(sorted(option.opts)) for option in command.params)
        for name, command in sorted(group.commands.items())
    }  # type: ignore[attr-defined]


def test_the_command_line_is_frozen() -> None:
    """A change here is a change for users: record it in CHANGELOG.md, then update command_line.json."""
    assert command_line() == json.loads(FROZEN.read_text(encoding="utf-8"))


def test_every_command_has_help() -> None:
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None) or parameter.name == "help", (name, parameter.name)


def test_help_groups_the_commands(vitkit: Command) -> None:
    group = typer.main.get_command(app)
    panels = {name: command.rich_help_panel for name, command in group.commands.items()}  # type: ignore[attr-defined]
    assert set(panels.values()) == {"Learn", "Data", "Train", "Use", "Ship"}
    assert [panels[name] for name in ("demo", "doctor", "train", "predict", "serve")] == list(COMMANDS)
    assert vitkit("--help").stdout.count("╭─") == 1 + len(COMMANDS)


def test_version() -> None:
    code = """
import sys
from vitkit.cli import main
sys.argv[1:] = ["--version"]
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["vitkit", __version__, "False"])


def test_every_option_states_its_default() -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for option in command.params:
            if not isinstance(option, TyperOption) or option.required or "(required)" in (option.help or ""):
                continue
            stated = re.findall(r"\(default: (.+?)\)", option.help or "")
            assert len(stated) == 1, (name, option.opts, option.help)
            if option.default is not None and not option.is_flag:
                value = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
                assert stated[0].partition(", ")[0] == value, (name, option.opts, option.help)


def test_a_default_is_shown_once(vitkit: Command) -> None:
    text = " ".join(vitkit("serve", "--help").stdout.replace("│", " ").split())
    assert "(default: 8000)" in text
    assert "(default: off)" in text
    assert "(default: 1)" in text  # --replicas, a number that Python takes for True
    assert "[default:" not in text


def test_help_names_every_row_that_may_be_chosen() -> None:
    from vitkit.cli import options
    from vitkit.jobs.bench import MEASURES
    from vitkit.jobs.peers import PEERS
    from vitkit.speed import ENGINES

    assert options.ENGINES.split(", ") == list(ENGINES)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    help_of = {(name, option.name): option.help for name in ("bench", "serve") for option in commands[name].params}
    for name in ("bench", "serve"):
        assert options.ENGINES in help_of[name, "engine"]
    for option, table in (("what", MEASURES), ("peer", PEERS)):
        assert all(row in help_of["bench", option] for row in table)


def test_models(vitkit: Command) -> None:
    done = vitkit("models")
    assert done.returncode == 0
    row = next(line for line in done.stdout.splitlines() if "vit-b/16" in line)
    assert row.split() == ["vit-b/16", "12", "768", "3072", "12", "16", "86,567,656", "35.1"]
    assert json.loads(vitkit("models", "--json").stdout)["vit-h/14"]["parameters"] == 632_045_800


def test_describe(tmp_path: Path, vitkit: Command) -> None:
    done = vitkit("describe", "vit-ti/16", "--image-size", "384x224", "--classes", "3", "--draw", str(tmp_path / "d"))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [
        "projection",
        "PatchProjection",
        "[1,",
        "3,",
        "384,",
        "224]",
        "[1,",
        "192,",
        "24,",
        "14]",
        "147,648",
        "yes",
    ] in lines
    assert sum("qkv" in line for line in lines) == 12
    for name in ("classes", "overview"):
        svg = (tmp_path / "d" / f"{name}.svg").read_text(encoding="utf-8")
        assert svg.startswith("<svg")
        assert "336" in svg


def test_describe_weights(tmp_path: Path, vitkit: Command) -> None:
    weights = save(
        create("vit-ti/16", num_classes=3, num_hidden_layers=1, num_register_tokens=2), tmp_path / "w.safetensors"
    )
    done = vitkit("describe", str(weights), "--depth", "0", "--image-size", "32", "--draw", str(tmp_path / "d"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[3].split()[:8] == ["w.safetensors", "ViT", "[1,", "3,", "32,", "32]", "[1,", "3]"]
    assert "left out huggingface.svg" in done.stdout
    assert "num_register_tokens=2" in done.stdout
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["classes.svg", "overview.svg"]
    done = vitkit("describe", str(weights), "--classes", "5")
    assert done.returncode == 2
    assert "Leave --classes out" in done.stderr
    bare = save(create("vit-ti/16", num_classes=3, num_hidden_layers=1), tmp_path / "bare.pth", dialect="timm")
    bare.with_name("bare.pth.vitkit.json").unlink()
    done = vitkit("describe", str(bare))
    assert (done.returncode, "--heads" in done.stderr) == (2, True)
    done = vitkit("describe", str(bare), "--heads", "3", "--depth", "0")
    assert done.returncode == 0, done.stderr
    done = vitkit("describe", "vit-ti/16", "--mean", "0.5")
    assert (done.returncode, "Leave --mean out" in done.stderr) == (2, True)


def test_walk(tmp_path: Path, vitkit: Command) -> None:
    done = vitkit("walk", "--model", "vit-ti/16", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "random" in done.stdout
    for words in ("[1, 3, 224, 224]", "[1, 196, 192]", "[1, 197, 192]", "Eq. 4  [1, 192]"):
        assert words in done.stdout
    assert (tmp_path / "here" / "2_patches.png").stat().st_size > 10_000


def test_walk_with_weights_and_a_photo(tmp_path: Path, vitkit: Command) -> None:
    spec = InputSpec(size=(64, 64), class_names=("ant", "bee", "cat", "dog"))
    model = create("vit-ti/16", num_classes=4, num_hidden_layers=1, image_size=64)
    model.input_spec = spec
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    save(model, tmp_path / "w.safetensors")
    Image.new("RGB", (80, 60), "red").save(tmp_path / "red.png")
    done = vitkit("walk", "red.png", "--from", "w.safetensors", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "random" not in done.stdout
    best = predict(model, tmp_path / "red.png", top=3)[0].guesses
    assert "probabilities: " + ", ".join(f"{g.name} {g.probability:.1%}" for g in best) in done.stdout
    assert len(list((tmp_path / "here").glob("*.png"))) == 9


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["describe", "vit-x/16"], ["Unknown variant 'vit-x/16'", "did you mean"]),
        (["describe", "vit-b/16", "--image-size", "225"], ["225", "multiple"]),
        (["describe", "vit-b/16", "--image-size", "big"], ["--image-size", "'big'"]),
        (["walk", "--model", "nothing"], ["Unknown variant"]),
        (["describe", "vit-ti/16", "--draw", "/dev/null/x"], ["/dev/null/x", "--draw"]),
        (["bench", "--what", "data", "--merge", "8"], ["merge applies to inference", "leave it out"]),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(args, words, vitkit: Command) -> None:
    done = vitkit(*args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr


def test_a_name_that_is_too_long_is_a_sentence(tmp_path: Path, vitkit: Command) -> None:
    for args in (
        ["inspect", "y" * 300],
        ["doctor", "y" * 300],
        ["train", "digits", "--recipe", "digits", "--out", "y" * 300],
    ):
        done = vitkit(*args, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (
            2,
            "vitkit: A name is too long for this file system. Use a shorter one.\n",
        )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_does_not_fit_is_a_sentence() -> None:
    for args in ("models", "recipes --json"):
        done = subprocess.run(
            f"{sys.executable} -m vitkit {args} > /dev/full", shell=True, capture_output=True, text=True, check=False
        )
        assert done.returncode == 3
        assert done.stderr.startswith("vitkit: No space is left where the output goes.")
        assert done.stderr.count("\n") == 1


def test_a_run_is_not_made_where_its_name_cannot_be_written_down(tmp_path: Path, vitkit: Command) -> None:
    done = vitkit("train", "digits", "--recipe", "digits", "--out", os.fsdecode(b"bad\xff"), cwd=tmp_path)
    assert done.returncode == 2
    assert "--out must be a name in UTF-8" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_picture_has_a_format(tmp_path: Path, vitkit: Command) -> None:
    done = vitkit("train", "digits", "--recipe", "digits", "--show-augmentations", "seen.txt", cwd=tmp_path)
    assert done.returncode == 2
    assert "--show-augmentations must end in .png, .svg, .pdf; got seen.txt" in done.stderr


def test_a_command_that_is_stopped_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*args: object, **how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(text, "print_table", stopped)
    monkeypatch.setattr(sys, "argv", ["vitkit", "models"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "vitkit: stopped.\n"


def test_files_are_utf8_in_an_ascii_locale(tmp_path: Path, vitkit: Command) -> None:
    model = create("vit-ti/16", image_size=32, num_hidden_layers=1, num_classes=2)
    model.input_spec = replace(model.input_spec, class_names=("crème brûlée", "寿司"))
    save(model, tmp_path / "weights", dialect="huggingface")
    config = tmp_path / "weights" / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")  # letters as they are, not escaped
    Image.new("RGB", (32, 32)).save(tmp_path / "photo.png")
    done = vitkit("predict", "weights", "photo.png", "--json", cwd=tmp_path, **ASCII)
    assert done.returncode == 0, done.stderr
    guesses = json.loads(done.stdout)["predictions"][0]["guesses"]
    assert {guess["name"] for guess in guesses} == {"crème brûlée", "寿司"}
    done = vitkit("predict", "weights", "photo.png", cwd=tmp_path, **ASCII)
    assert done.returncode == 0, done.stderr
    assert r"cr\xe8me br\xfbl\xe9e" in done.stdout  # what the terminal cannot show is escaped


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m vitkit describe vit-b/16 | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="terminals of other systems do not disappear")
@pytest.mark.parametrize("buffered", [True, False])
def test_a_closed_terminal_is_no_error(buffered: bool) -> None:
    """A command that outlives its terminal goes on, and its exit code says how it went."""
    master, slave = os.openpty()
    raw = os.fdopen(slave, "wb", -1 if buffered else 0)
    before = TextIOWrapper(raw, "utf-8", line_buffering=True, write_through=not buffered)  # type: ignore[type-var]
    stream = prepare(before)
    print("seen", file=stream)
    text = os.read(master, 100)
    while not text.endswith(b"\n"):  # what was written in two parts may arrive in two
        text += os.read(master, 100)
    assert text == b"seen\r\n"
    os.close(master)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(slave, b"lost")
    print("lost", file=stream, flush=True)
    before.close()
    with pytest.raises(OSError, match="Bad file descriptor"):  # only a closed terminal is passed over
        print("lost", file=stream, flush=True)
    with contextlib.suppress(OSError):  # otherwise Python 3.13 warns of it when the stream is collected
        stream.close()


# Names that try to do something


def test_names_cannot_write_to_the_terminal(tmp_path: Path, vitkit: Command) -> None:
    """A terminal obeys what follows an escape character, and a table would obey rich's markup."""
    save(create("ti/16", image_size=32, num_classes=2), tmp_path / "m.safetensors")
    name = "\x1b]0;owned\x07\u202egnp.jpg"
    (tmp_path / name).write_bytes(b"not an image")
    Image.new("RGB", (40, 40)).save(tmp_path / f"good{name}", "PNG")
    for arguments in (
        ("predict", "m.safetensors", name, f"good{name}"),
        ("inspect", name),
        ("walk", name, "--from", "m.safetensors"),
    ):
        done = vitkit(*arguments, cwd=tmp_path)
        text = done.stdout + done.stderr
        assert r"\x1b]0;owned\x07\u202egnp.jpg" in text, arguments
        assert not re.search("[\x1b\x07\u202e]", text), arguments


def test_a_name_cannot_look_like_a_line_of_ours(tmp_path: Path, vitkit: Command) -> None:
    save(create("ti/16", image_size=32, num_classes=2), tmp_path / "m.safetensors")
    (tmp_path / "x\nvitkit: all is well.jpg").write_bytes(b"not an image")
    for arguments in (
        ("predict", "m.safetensors", "."),
        ("walk", "x\nvitkit: all is well.jpg", "--from", "m.safetensors"),
    ):
        done = vitkit(*arguments, cwd=tmp_path)
        assert r"x\nvitkit: all is well.jpg" in done.stderr, arguments
        assert "\nvitkit: all" not in done.stderr, arguments


def test_markup_in_a_class_name_is_text(tmp_path: Path, vitkit: Command) -> None:
    lines = ["path,label"]
    for n, label in enumerate(["[/b]", "[red]x", "[/b]", "[red]x"]):
        Image.new("RGB", (40, 40), (n, n, 90 * (n % 2))).save(tmp_path / f"{n}.png")
        lines.append(f"{n}.png,{label}")
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    done = vitkit("doctor", "t.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[/b]" in done.stdout
    assert "[red]x" in done.stdout


def test_formulas_in_csv_output_are_text(tmp_path: Path, vitkit: Command) -> None:
    names = ("=HYPERLINK(1)", "@b", "-1.5", "+x")
    model = create("ti/16", image_size=32, num_classes=4)
    model.input_spec = replace(model.input_spec, class_names=names)
    save(model, tmp_path / "m.safetensors")
    Image.new("RGB", (40, 40)).save(tmp_path / "=cmd.png")
    done = vitkit("predict", "m.safetensors", "=cmd.png", "--csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split(",") for line in done.stdout.splitlines()[1:]]
    assert {row[0] for row in rows} == {"'=cmd.png"}
    assert {row[2] for row in rows} == {"'=HYPERLINK(1)", "'@b", "-1.5", "'+x"}
    done = vitkit("predict", "m.safetensors", "=cmd.png", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["predictions"][0]["image"] == "=cmd.png"
