"""Share a run: its model card, and a folder for the Hugging Face hub that vitkit and transformers load."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vitkit
from vitkit.checkpoints import hub, load, save, to_dialect
from vitkit.checkpoints.atomic import writing
from vitkit.checkpoints.outputs import check_file
from vitkit.errors import CannotExpress, ConfigError, Occupied
from vitkit.jobs.report import evaluation_of
from vitkit.model.backbone import Backbone
from vitkit.model.config import variant_of
from vitkit.model.count import parameters
from vitkit.reports.render import data_name, images_of
from vitkit.training.run_folder import RunFolder

NAME = "owner/name"  # placeholder for the model id in a card
MOST = 50  # classes that a card lists with their results
TIMM = {"ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge"}
SPECIAL = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_{}[]<>|#"})


def write_card(run: str | Path, out: str | Path | None = None, *, name: str = NAME, licence: str | None = None) -> Path:
    """Write the model card of a run, and return its path.

    Args:
        run: the run folder.
        out: the file (default: `README.md` in the run folder).
        name: the model's id on the hub.
        licence: licence of the weights (default: what the weights they started from state).

    Raises:
        Occupied: there is a card that was edited by hand.
    """
    folder = RunFolder.open(run)
    path = check_file(out if out is not None else folder.path / "README.md", (".md",), "--out")
    _check_unchanged(path)
    with writing(path) as private:
        model = load(folder.path)
        with folder.reading():
            text = card(folder, model, name, licence)
        private.write_text(text + _mark(text), encoding="utf-8", errors="replace")
    return path


def _mark(text: str) -> str:
    """Return the last line of a card, by which `write_card` sees whether somebody changed it since."""
    return f"\n<!-- vitkit card {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]} -->\n"


def _check_unchanged(path: Path) -> None:
    """Refuse to replace a text that is not exactly a card that `write_card` wrote."""
    if not path.is_file() or not (text := path.read_text(encoding="utf-8", errors="replace")):
        return
    own = text[: -len(_mark(""))]
    if text != own + _mark(own):
        raise Occupied(
            f"Expected a new file, or a card as vitkit wrote it, to replace; {path} was edited or written by hand. "
            f"Write the new card to another file with --out, or move this one away first."
        )


def card(run: RunFolder, model: Backbone, name: str = NAME, licence: str | None = None) -> str:
    """Return the model card of a run as Markdown, with the front matter that the hub reads.

    Args:
        run: the run.
        model: its model.
        name: the model's id on the hub.
        licence: licence of the weights (default: what the weights they started from state).
    """
    info, found = run.info, evaluation_of(run)
    data = info.get("data", {})
    terms, title = licence or model.licence, run.path.resolve().name if name == NAME else name.rpartition("/")[2]
    spoken = data_name(data.get("spec", "")) or "unknown data"  # no path of this machine
    sections = [
        _front_matter(title, terms, found),
        f"# {_plain(title)}\n\n"
        f"{variant_of(model.config) or 'A Vision Transformer'} with {parameters(model.config):,} parameters, "
        f"{'fitted to frozen features' if info.get('kind') == 'probe' else 'trained'} by "
        f"vitkit {vitkit.__version__}"
        + (f", starting from `{Path(str(info['weights'])).name}`" if info.get("weights") else "")
        + ".",
        _data(data, spoken, model),
        _results(found),
        _preprocessing(model),
        "## Licence\n\n"
        + (
            f"{_plain(terms)}."
            if terms
            else "Not stated. The licence of the weights that this model started from, and of the photos, applies."
        ),
        _loading(model, name),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _plain(text: object) -> str:
    """Return a text that Markdown shows as it is, on one line."""
    return " ".join(str(text).split()).translate(SPECIAL)


def _front_matter(title: str, terms: str, found: Mapping[str, Any] | None) -> str:
    values: dict[str, Any] = {
        "library_name": "vitkit",
        "pipeline_tag": "image-classification",
        "tags": ["vit", "image-classification", "vitkit"],
    }
    if terms:
        values["license"] = terms
    if found:
        values["model-index"] = [
            {
                "name": title,
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"name": data_name(found.get("data", "")) or "unknown data", "type": "custom"},
                        "metrics": [_metric(found)],
                    }
                ],
            }
        ]
    return "---\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in values.items()) + "\n---"


def _metric(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one number of an evaluation that the hub shows."""
    if found.get("several"):
        return {"type": "mAP", "name": "mean average precision", "value": round(found["mean_ap"], 4)}
    return {"type": "accuracy", "value": round(found["top1"], 4)}


def _data(data: Mapping[str, Any], spoken: str, model: Backbone) -> str:
    names = model.input_spec.class_names
    counts = data.get("counts") or {}
    listed = [f"{_plain(name)} ({counts[name]})" if name in counts else _plain(name) for name in names[:MOST]]
    more = f", and {len(names) - MOST} more" if len(names) > MOST else ""
    images = f"{data['train']:,} training images" if "train" in data else "Training images"
    return (
        f"## Data\n\n{images} from `{spoken.replace('`', '')}`, "
        f"{f'any number of {len(names)} labels per image' if model.input_spec.several else f'{len(names)} classes'}"
        f"{' (number of training images)' if counts else ''}: {', '.join(listed)}{more}."
    )


def _results(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "## Results\n\nNot evaluated. Run `vitkit eval` on the run, and write the card again."
    if found.get("several"):
        return _label_results(found)
    low, high = found["ci95"]
    lines = [
        f"## Results\n\nOn {found['n']:,} images ({_plain(images_of(found))}):\n",
        "| measure | value | 95% interval |",
        "|---|---|---|",
        f"| top-1 accuracy | {found['top1']:.1%} | {low:.1%} to {high:.1%} |",
    ]
    if len(found["per_class"]) > 5:
        low, high = found["top5_ci95"]
        lines.append(f"| top-5 accuracy | {found['top5']:.1%} | {low:.1%} to {high:.1%} |")
    lines += [f"| macro F1 | {found['macro_f1']:.3f} | |", f"| expected calibration error | {found['ece']:.3f} | |"]
    lines += ["\n| class | images | precision | recall |", "|---|---|---|---|"]
    for row in found["per_class"][:MOST]:
        shares = f"{_share(row['precision'])} | {_share(row['recall'])}"
        lines.append(f"| {_plain(row['name'])} | {row['support']} | {shares} |")
    return "\n".join(lines)


def _label_results(found: Mapping[str, Any]) -> str:
    (low, high), (least, most) = found["ci95"], found["micro_f1_ci95"]
    lines = [
        f"## Results\n\nOn {found['n']:,} images ({_plain(images_of(found))}), at the thresholds below:\n",
        "| measure | value | 95% interval |",
        "|---|---|---|",
        f"| mAP | {found['mean_ap']:.1%} | {low:.1%} to {high:.1%} |",
        f"| micro F1 | {found['micro_f1']:.3f} | {least:.3f} to {most:.3f} |",
        f"| macro F1 | {found['macro_f1']:.3f} | |",
        f"| images with exactly their labels | {found['exact']:.1%} | |",
        "\n| label | images | average precision | threshold | precision | recall |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["per_class"][:MOST]:
        shares = " | ".join(_share(row[name]) for name in ("ap", "threshold", "precision", "recall"))
        lines.append(f"| {_plain(row['name'])} | {row['support']} | {shares} |")
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _preprocessing(model: Backbone) -> str:
    spec, known = model.input_spec, model.known
    size = f"{spec.size[0]} x {spec.size[1]} px"
    how = (
        f"resized to {size}"
        if spec.resize == "squash"
        else f"resized and cropped to the central {size} ({spec.crop:.0%} of the side)"
    )
    text = (
        f"## Preprocessing\n\nImages are converted to {spec.channels}, {how} with the {spec.interpolation} filter, "
        f"scaled to 0..1, and normalised with mean {_numbers(spec.mean)} and standard deviation {_numbers(spec.std)}."
    )
    if spec.several:
        text += (
            "\n\nEach output is a label of its own: its probability is the sigmoid of the output, and an image gets "
            "the label if that reaches the label's threshold. vitkit keeps the thresholds with the weights."
        )
    if known is not None:
        text += (
            f'\n\nvitkit answers "none of these" for images far from all classes; it was set to accept '
            f"{known.accept:.0%} of images of the known classes. Near relatives of a class are often accepted."
        )
    return text


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _loading(model: Backbone, name: str) -> str:
    blocks = [
        "## How to use it\n\nIn vitkit:\n",
        "```python",
        "import vitkit",
        "",
        f'model = vitkit.load("{name}")',
        'print(vitkit.predict(model, "photo.jpg")[0].name)',
        "```",
    ]
    if model.known is not None:
        blocks += [
            '\nThe file `vitkit.safetensors` of this repository also answers "none of these": load it by its path.',
        ]
    try:
        to_dialect(model, "huggingface")
    except CannotExpress:
        return "\n".join(blocks)
    blocks += [
        "\nIn transformers:\n",
        "```python",
        "from transformers import ViTForImageClassification, ViTImageProcessor",
        "",
        f'model = ViTForImageClassification.from_pretrained("{name}")',
        f'processor = ViTImageProcessor.from_pretrained("{name}")',
        "```",
    ]
    if model.input_spec.several:
        blocks += [
            "\nIts `problem_type` is `multi_label_classification`: compare `logits.sigmoid()` with the thresholds."
        ]
    kind, _, patch = variant_of(model.config).removeprefix("vit-").partition("/")
    if kind in TIMM:
        blocks += [
            f"\nIn timm, after `vitkit convert {name} model.pth --to timm`:\n",
            "```python",
            "import timm",
            "",
            f'model = timm.create_model("vit_{TIMM[kind]}_patch{patch}_224", img_size={model.input_spec.size}, '
            f'num_classes={model.config.num_classes}, checkpoint_path="model.pth")',
            "```",
        ]
    return "\n".join(blocks)


@dataclass(frozen=True)
class Pushed:
    """What `push` has sent, or would send.

    Args:
        name: the model's id on the hub.
        files: {file: its size in bytes}.
        url: address of the model; empty after a dry run.
    """

    name: str
    files: dict[str, int]
    url: str


def push(
    run: str | Path, name: str, *, private: bool = False, licence: str | None = None, dry_run: bool = False
) -> Pushed:
    """Send a run's model with its card to the Hugging Face hub.

    The files are in transformers' format, which vitkit loads by the same id; if that format cannot hold the model, they
    are in vitkit's own. Training states, logs and photos stay here.

    Args:
        run: the run folder.
        name: owner/name on the hub.
        private: whether only you can see a new repository.
        licence: licence of the weights (default: what the weights they started from state).
        dry_run: whether to only say what would be sent, without a network.

    Raises:
        HubError: the hub refused, or cannot be reached.
    """
    hub.check_name(name)
    with tempfile.TemporaryDirectory(prefix="vitkit-push-") as place:
        files = bundle(run, place, name=name, licence=licence)
        url = "" if dry_run else hub.upload(place, name, private=private)
    return Pushed(name, files, url)


def bundle(run: str | Path, out: str | Path, *, name: str = NAME, licence: str | None = None) -> dict[str, int]:
    """Write the files of a run that go to the hub into a folder, and return {file: size in bytes}.

    Args:
        run: the run folder.
        out: the folder.
        name: the model's id on the hub.
        licence: licence of the weights (default: what the weights they started from state).
    """
    folder, out = RunFolder.open(run), Path(out)
    model = load(folder.path)
    if model.config.num_classes == 0:
        raise ConfigError(f"Expected a classifier; {run} has no classes.")
    model.licence = licence or model.licence
    try:
        save(model, out, "huggingface")
        if model.known is not None:
            save(model, out / "vitkit.safetensors")
    except CannotExpress:
        save(model, out / "model.safetensors")
    with folder.reading():
        text = card(folder, model, name, licence)
    (out / "README.md").write_text(text, encoding="utf-8", errors="replace")
    return {file.name: file.stat().st_size for file in sorted(out.iterdir()) if file.is_file()}
