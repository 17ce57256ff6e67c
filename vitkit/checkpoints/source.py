"""Find weights: a file, a run, a folder, or a hub id. FINDERS lists what a source may be."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.checkpoints import hub
from vitkit.errors import ConfigError, UnreadableFile, nearest
from vitkit.model.create import configuration

# The names that transformers, timm and open_clip give to weights in a folder, best first.
WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
)
RUN = ("best", "last", "ema")  # the checkpoints of a run folder; RUN@ema selects one of them
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")
FOLDERS = ("runs", "checkpoints", "models", "weights", "data", "out", "output", "outputs")  # never owners on the hub


@dataclass(frozen=True)
class Files:
    """The files of one checkpoint.

    Args:
        label: what messages call it; preprocessing presets are looked up by it too.
        weights: the file of tensors, or the index of a sharded one.
        config: the parsed config.json from the same folder, transformers', timm's or open_clip's; None without one.
        preprocessor: the parsed preprocessor_config.json from the same folder; None without one.
    """

    label: str
    weights: Path
    config: dict[str, Any] | None = None
    preprocessor: dict[str, Any] | None = None


def find(source: str | Path, revision: str | None = None) -> Files:
    """Find the files of a source.

    Args:
        source: a file, a folder, a run (`runs/x`, `runs/x@ema`), or a hub id (`google/vit-base-patch16-224`,
            optionally with `@revision`).
        revision: branch, tag or commit on the hub.

    Raises:
        UnreadableFile: no such file, or a folder without weights.
        HubError: a hub file that could not be fetched.
    """
    place = str(Path(source).expanduser()) if str(source).startswith("~") else str(source)
    for finder in FINDERS.values():
        if (files := finder(place, revision)) is not None:
            return files
    folder = Path(place).parent
    if os.path.lexists(place):
        raise UnreadableFile(f"Expected a file or folder of weights; {str(source)!r} is neither, or a broken link.")
    there = sorted(p for p in folder.iterdir() if p.is_dir() or p.suffix in SUFFIXES) if folder.is_dir() else []
    shown = [str(Path(source).parent / path.name) for path in there]
    raise UnreadableFile(
        f"There is no file or folder {str(source)!r}{nearest(str(source), shown) or ','} and it is not a hub id "
        f"(owner/name, such as google/vit-base-patch16-224)."
    )


def _file(source: str, revision: str | None) -> Files | None:
    path = Path(source)
    if not path.is_file():
        return None
    return with_json(path, source) if path.name in WEIGHTS else Files(source, path)


def run_weights(folder: Path, which: str = "") -> Path:
    """Return the checkpoint that a run folder (`vitkit train`, `vitkit probe`) stands for.

    Args:
        folder: holds run.json.
        which: a name in RUN (default: the best, or the last if there is no best).

    Raises:
        UnreadableFile: there is no such checkpoint (yet); lists those there are.
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
            return with_json(folder / name, source)
    found = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if len(found) == 1:
        return with_json(found[0], source)
    if found:
        raise UnreadableFile(
            f"{source} holds several files of weights ({', '.join(f.name for f in found[:5])}); choose one of them."
        )
    if (folder / ".teach").is_dir():
        raise UnreadableFile(f"{source} has not been saved: open `vitkit teach {source}` and press Save.")
    raise UnreadableFile(
        f"Expected one of {', '.join(WEIGHTS)}, or a single file ending in {', '.join(SUFFIXES)}; "
        f"{source} holds no weights."
    )


def _hub(source: str, revision: str | None) -> Files | None:
    if re.fullmatch(r"(vit|resnetv2)_\w+\.\w+", source):  # a timm name: its weights are on the hub under timm/
        source = f"timm/{source}"
    name, _, pinned = source.partition("@")
    owner = name.partition("/")[0]
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) or Path(name).suffix in SUFFIXES:
        return None
    if owner in FOLDERS or Path(owner).exists() or pinned in RUN:  # a mistyped path, not a repository
        return None
    return with_json(hub.fetch(name, revision or pinned or None, WEIGHTS), name)


def with_json(weights: Path, label: str) -> Files:
    """Return a checkpoint with the JSON files in its folder, which belong to it."""
    found: list[dict[str, Any] | None] = []
    own = {"config.json": hub.OPEN_CLIP} if weights.name.startswith("open_clip") else {}
    for path in (weights.parent / own.get(name, name) for name in hub.SMALL):
        try:
            values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (ValueError, OSError, RecursionError) as error:
            raise UnreadableFile(f"{path} is not valid JSON ({error}); correct or remove it.") from None
        if values is not None and not isinstance(values, dict):
            raise UnreadableFile(f"{path} is not a JSON object; correct or remove it.")
        found.append(values)
    return Files(label, weights, *found)


def _variant(source: str, revision: str | None) -> Files | None:
    """Refuse the name of an architecture, such as vit-b/16, before the hub is asked for it."""
    if not re.fullmatch(r"[\w+-]+(/\d+)?", source):
        return None
    try:
        configuration(source)
    except ConfigError:
        return None
    raise UnreadableFile(
        f"Expected weights: a file, a run folder or a hub id such as google/vit-base-patch16-224; {source!r} is the "
        f"name of an architecture, which has none. vitkit.create({source!r}) makes a model with random weights."
    )


FINDERS: dict[str, Callable[[str, str | None], Files | None]] = {  # tried in order; None leaves it to the next
    "file": _file,
    "run": _run,
    "folder": _folder,
    "variant": _variant,
    "hub": _hub,
}
