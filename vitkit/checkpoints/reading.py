"""load: any public ViT checkpoint -> ViT."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints import containers, external_configs, preprocessing_presets, sidecar
from vitkit.checkpoints.dialects import DIALECTS, recognise, skeleton
from vitkit.checkpoints.infer import adapt, infer
from vitkit.checkpoints.rules import Dialect, check, complete_positions
from vitkit.checkpoints.source import Files, find
from vitkit.errors import ConfigError, TensorMismatch, nearest, pick
from vitkit.model.config import NUMERICS, InputSpec, ViTConfig
from vitkit.model.vit import ViT

log = logging.getLogger("vitkit")

# What may be given to load: changes of the model, and facts about it that a file may not say.
CHANGES = ("image_size", "num_channels", "num_classes", "pre_logits")
FACTS = (
    "num_attention_heads",
    "layer_norm_eps",
    "hidden_act",
    "position_resize",
    "pool",
    "norm_after_pool",
    "pad_input",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "drop_path_rate",
    "chunk_size_feed_forward",
    "initializer_range",
)
SPEC = ("mean", "std", "resize", "crop", "interpolation", "channels", "backend", "class_names")


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a source says, before a model is built.

    Args:
        files: where it is.
        dialect: how it is spelled.
        config: the model, with the user's changes.
        input_spec: what it expects to be fed.
        state: tensors by the model's names, fitting `config`.
        tensors: number of tensors in the file.
        unused: names of tensors that are accounted for but not used.
        notes: what was assumed or changed, a sentence each.
        extra: free-form strings of a native file.
    """

    files: Files
    dialect: Dialect
    config: ViTConfig
    input_spec: InputSpec
    state: dict[str, Tensor]
    tensors: int
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)


def load(
    source: str | Path,
    *,
    dialect: str | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    **overrides: Any,
) -> ViT:
    """Load a model from a file, a folder or the hub, ready to predict (in eval mode).

    Args:
        source: `.safetensors`, `.pth`, `.pt`, `.bin` or `.npz` file; folder; hub id (`google/vit-base-patch16-224`).
        dialect: a row of DIALECTS; recognised from the tensors' names when not given.
        revision: branch, tag or commit on the hub.
        dtype: type of the weights; the file's own when not given.
        device: where they go; the CPU when not given.
        overrides: changes (`image_size`, `num_channels`, `num_classes`), facts that the file does not say
            (`num_attention_heads`, `layer_norm_eps`, `hidden_act`, ...), and fields of InputSpec (`mean`, `std`,
            `class_names`, ..., or a whole `input_spec`).

    Raises:
        CheckpointError: the file cannot be read, or does not hold such a model; one sentence says why.
        ConfigError: an override that is not known or does not fit.
    """
    checkpoint = open_checkpoint(source, dialect=dialect, revision=revision, **overrides)
    for note in checkpoint.notes:
        log.warning("%s: %s", checkpoint.files.label, note)
    return build(checkpoint, dtype, device)


def build(
    checkpoint: Checkpoint, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> ViT:
    """The model of an opened checkpoint; its parameters are the file's tensors, not copies of them."""
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ConfigError(f"dtype must be a type of torch, such as float32 or bfloat16; got {dtype!r}.")
        dtype = found
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype must be a floating-point type, such as float32 or bfloat16; got {dtype}.")
    model = skeleton(checkpoint.config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    check(checkpoint.state, expected, checkpoint.dialect)
    state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in checkpoint.state.items()}
    model.load_state_dict(state, assign=True)
    model.input_spec = checkpoint.input_spec
    return model.eval()


def open_checkpoint(
    source: str | Path, *, dialect: str | None = None, revision: str | None = None, **overrides: Any
) -> Checkpoint:
    """Read a source and say what it holds; no model is built. The arguments are those of `load`."""
    config_overrides, spec_overrides = _split(overrides)
    row = pick(DIALECTS, dialect, "dialect") if dialect is not None else None
    files, notes = find(source, revision), list[str]()
    tensors, metadata = containers.read(files.weights)
    count, row = len(tensors), row or recognise(tensors)
    if (pieces := row.pieces(tensors)) and ".safetensors" in files.weights.suffixes:
        # They are copied into our tensors. From a mapping of their own, which goes when they do, they are not in
        # memory twice.
        tensors |= containers.read(files.weights, pieces)[0]
    state, hints, unused = row.read(tensors)
    del tensors
    if odd := [name for name, tensor in state.items() if not tensor.is_floating_point()]:
        raise TensorMismatch(
            f"Expected floating-point weights; {row.in_file(odd[0])!r} is {state[odd[0]].dtype}. "
            f"Quantized files are not read."
        )
    if unused:
        notes.append(
            f"{len(unused)} tensors belong to the file but not to the model and are not used: "
            f"{', '.join(unused[:4])}{', ...' if len(unused) > 4 else ''}."
        )

    own_config, own_spec, extra = _own(files, row, metadata, notes)
    stated = hints | own_config
    own = infer(state, row, stated, config_overrides, notes)
    complete_positions(state, own)
    wanted = _changed(own, config_overrides)
    adapt(state, own, wanted, notes)
    spec = _input_spec(files, row, own, wanted, own_spec, spec_overrides, config_overrides, notes)
    return Checkpoint(files, row, wanted, spec, state, count, unused, notes, extra)


def _split(overrides: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Which overrides are of the model and which of its input; an unknown one is refused by name."""
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if "num_labels" in overrides:
        overrides["num_classes"] = overrides.pop("num_labels")
    known_names = (*CHANGES, *FACTS, *SPEC, "input_spec")
    for name in overrides:
        if name not in known_names:
            raise ConfigError(
                f"load() has no argument {name!r}{nearest(name, list(known_names)) or '.'} It takes "
                f"{', '.join(known_names)}."
            )
    config = {name: value for name, value in overrides.items() if name in CHANGES + FACTS}
    return config, {name: value for name, value in overrides.items() if name not in config}


def _own(
    files: Files, row: Dialect, metadata: dict[str, str], notes: list[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """What stands in the file or beside it: fields of ViTConfig, fields of InputSpec, free-form strings."""
    if "vitkit" in metadata:
        try:
            values = json.loads(metadata["vitkit"])
        except ValueError:
            values = None
        if (found := sidecar.understand(values)) is not None:
            return _fields(found[0]), found[1].to_dict(), dict(values.get("extra") or {})
        notes.append("The file's own description cannot be read by this version; it is not used.")
    config: dict[str, Any] = {}
    spec: dict[str, Any] = {}
    if (found := sidecar.read(files.weights, notes)) is not None:
        config, spec = _fields(found[0]), found[1].to_dict()
    if files.config is not None:
        fields, prepared = external_configs.read_beside(files.config, files.preprocessor)
        config, spec = config | fields, spec | prepared
    elif not config and not preprocessing_presets.preprocessing(files.label, files.weights.name):
        numerics = ", ".join(f"{name} {value}" for name, value in NUMERICS[row.numerics].items())
        notes.append(f"Nothing beside the file says its numerics; {row.name}'s own are taken ({numerics}).")
    return config, spec, {}


def _fields(config: ViTConfig) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _changed(own: ViTConfig, given: dict[str, Any]) -> ViTConfig:
    """The file's configuration with the user's changes."""
    changes = dict(given)
    if changes.get("num_classes", own.num_classes) != own.num_classes:
        changes.setdefault("pre_logits", False)  # fine-tuning replaces the whole head (section 3.1)
    if changes.get("pre_logits") and not own.pre_logits:
        raise ConfigError("pre_logits=True asks for a layer that this file does not have.")
    if changes.get("pool") == "cls":
        changes.setdefault("norm_after_pool", False)
    return dataclasses.replace(own, **changes)


def _input_spec(
    files: Files,
    row: Dialect,
    own: ViTConfig,
    config: ViTConfig,
    stated: dict[str, Any],
    given: dict[str, Any],
    changes: dict[str, Any],
    notes: list[str],
) -> InputSpec:
    """What the model expects to be fed: as stated, as known for this checkpoint, or as the dialect's library does."""
    if "input_spec" in given:
        spec: InputSpec = given["input_spec"]
        return spec.check(config)
    if "mean" not in stated:
        public = preprocessing_presets.preprocessing(files.label, files.weights.name)
        default: dict[str, Any] = public.spec if public else preprocessing_presets.DEFAULTS[row.name]
        stated = {**default, **stated}
        if public is None and not {"mean", "std"} <= set(given):
            notes.append(
                f"How its images were prepared is not known; {row.name}'s usual way is taken (mean "
                f"{_numbers(stated['mean'])}, std {_numbers(stated['std'])}). Give mean= and std= (--mean, "
                f"--std) if it was another: wrong ones cost much accuracy."
            )
    fields = {"size": config.image_hw, **stated}
    if own.grid != config.grid or "image_size" in changes:
        fields["size"] = config.image_hw
    if len(fields.get("class_names", ())) != config.num_classes:
        fields.pop("class_names", None)
    if own.num_channels != config.num_channels:
        fields.pop("channels", None)
    for name in ("mean", "std"):
        if name in given and not isinstance(given[name], Sequence):
            given[name] = (given[name],) * config.num_channels
    if given.get("resize") == "squash":
        given.setdefault("crop", 1.0)
    return external_configs.spec_of(config, fields | given).check(config)


def _numbers(values: Sequence[float]) -> str:
    return "/".join(f"{value:g}" for value in values)
