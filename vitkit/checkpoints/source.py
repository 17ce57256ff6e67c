"""Where weights are: a file, a folder, or a hub id. FINDERS is the one place that says what a source may be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.checkpoints import hub
from vitkit.errors import UnreadableFile

# What a folder of transformers or timm calls its weights, best first.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
RUN = ("best", "last", "ema")  # what a run folder calls its checkpoints; RUN@ema names one of them
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")


@dataclass(frozen=True)
class Files:
    """The files of one checkpoint.

    Args:
        label: what it is called in messages; also searched for known checkpoints.
        weights: the file of tensors, or the index of a sharded one.
        config: config.json beside it, transformers' or timm's; None when there is none.
        preprocessor: preprocessor_config.json beside it; None when there is none.
    """

    label: str
    weights: Path
    config: dict[str, Any] | None = None
    preprocessor: dict[str, Any] | None = None


def find(source: str | Path, revision: str | None = None) -> Files:
    """Find the files that a source names.

    Args:
        source: a file, a folder, a run (`runs/x`, `runs/x@ema`), or a hub id (`google/vit-base-patch16-224`, with
            `@revision` or not).
        revision: branch, tag or commit on the hub.

    Raises:
        UnreadableFile: no such file, or a folder without weights.
        HubError: a hub file that could not be fetched.
    """
    for finder in FINDERS.values():
        if (files := finder(str(source), revision)) is not None:
            return files
    raise UnreadableFile(
        f"There is no file or folder {str(source)!r}, and it is no hub id "
        f"(owner/name, such as google/vit-base-patch16-224)."
    )


def _file(source: str, revision: str | None) -> Files | None:
    path = Path(source)
    if not path.is_file():
        return None
    return beside(path, source) if path.name in WEIGHTS else Files(source, path)


def run_weights(folder: Path, which: str = "") -> Path:
    """The checkpoint that a run folder (`vitkit train`, `vitkit probe`) means.

    Args:
        folder: holds run.json.
        which: one of RUN; the best, else the last, when not given.

    Raises:
        UnreadableFile: there is no such checkpoint (yet); lists what there is.
    """
    there = [name for name in RUN if (folder / f"{name}.safetensors").is_file()]
    wanted = [which] if which else ["best", "last"]
    for name in wanted:
        if name in there:
            return folder / f"{name}.safetensors"
    raise UnreadableFile(
        f"The run {folder} has no {' or '.join(wanted)} weights; it has: {', '.join(there) or 'none yet'}."
    )


def _run(source: str, revision: str | None) -> Files | None:
    place, _, which = source.rpartition("@") if "@" in source else (source, "", "")
    for folder, name in ((Path(source), ""), (Path(place), which)):
        if (folder / "run.json").is_file():
            return Files(source, run_weights(folder, name))
    return None


def _folder(source: str, revision: str | None) -> Files | None:
    folder = Path(source)
    if not folder.is_dir():
        return None
    for name in WEIGHTS:
        if (folder / name).is_file():
            return beside(folder / name, source)
    found = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if len(found) == 1:
        return beside(found[0], source)
    if found:
        raise UnreadableFile(
            f"{source} holds several files of weights ({', '.join(f.name for f in found[:5])}); name one of them."
        )
    raise UnreadableFile(
        f"{source} holds no weights; expected one of {', '.join(WEIGHTS)} or one file ending in {', '.join(SUFFIXES)}."
    )


def _hub(source: str, revision: str | None) -> Files | None:
    if re.fullmatch(r"vit_\w+\.\w+", source):  # a timm name: its weights are on the hub under timm/
        source = f"timm/{source}"
    name, _, pinned = source.partition("@")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) or Path(name).suffix in SUFFIXES:
        return None
    return beside(hub.fetch(name, revision or pinned or None, WEIGHTS), name)


def beside(weights: Path, label: str) -> Files:
    """The files of a checkpoint whose weights are at `weights`: the JSON files beside them belong to it."""
    return Files(label, weights, *(_json(weights.parent / name) for name in hub.SMALL))


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UnreadableFile(f"{path} is no JSON ({error}); correct or remove it.") from None
    if not isinstance(values, dict):
        raise UnreadableFile(f"{path} holds no JSON object; correct or remove it.")
    return values


FINDERS: dict[str, Callable[[str, str | None], Files | None]] = {  # tried in this order; None passes on
    "file": _file,
    "run": _run,
    "folder": _folder,
    "hub": _hub,
}
