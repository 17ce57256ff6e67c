"""Load any public ViT checkpoint, or say what it is."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints import adapters, architectures, containers, external_configs, preprocessing_presets, sidecar
from vitkit.checkpoints.dialects import DIALECTS, every_dialect, fill, identify, skeleton
from vitkit.checkpoints.infer import adapt, infer
from vitkit.checkpoints.licence import licence_of
from vitkit.checkpoints.native import PRETRAINING
from vitkit.checkpoints.resnets import RESNET_DIALECTS, infer_resnet
from vitkit.checkpoints.rules import Dialect, check, complete_positions, few
from vitkit.checkpoints.source import Files, find
from vitkit.devices import AUTO, find_device
from vitkit.errors import ConfigError, TensorMismatch, nearest
from vitkit.model import checks
from vitkit.model.backbone import Backbone, Config
from vitkit.model.config import NUMERICS, InputSpec, variant_of
from vitkit.model.count import parameters
from vitkit.model.known import Known
from vitkit.model.resnet_config import ResNetConfig

log = logging.getLogger("vitkit")
Fields = dict[str, Any]

# What load() accepts: changes to the model, and facts about it that a file may not state.
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
    "standardisation",
)
SPEC = ("mean", "std", "resize", "crop", "interpolation", "channels", "backend", "class_names", "thresholds")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read, before a model is built from it.

    Args:
        files: where it is.
        dialect: how it is spelled.
        config: the model, with the user's changes.
        input_spec: what the model expects to be fed.
        state: tensors by the model's names, fitting `config`.
        tensors: number of tensors in the file.
        unused: names of tensors that are accounted for but not used.
        notes: what was assumed or changed, one sentence each.
        extra: free-form strings of a native file.
        known: what a native file says about the known classes; see model/known.py.
        names: each name in the file -> the name that its dialect knows, without prefixes and as renamed.
        key: where in the file the weights are.
        licence: what its files state about the licence of the weights, in one line; empty if nothing.
    """

    files: Files
    dialect: Dialect
    config: Config
    input_spec: InputSpec
    state: dict[str, Tensor]
    tensors: int
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    key: str | None = None
    licence: str = ""
    known: Known | None = None

    def raw(self) -> dict[str, Tensor]:
        """Return the tensors as they are in the file, under the names that its dialect knows."""
        tensors = containers.read(self.files.weights, key=self.key)[0]
        return {new: tensors[old] for old, new in self.names.items()} or tensors


def load(
    source: str | Path,
    *,
    dialect: str | None = None,
    revision: str | None = None,
    rename: Mapping[str, str] | None = None,
    key: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    backbone: str | Path | None = None,
    **overrides: Any,
) -> Backbone:
    """Load a model from a file, a folder or the hub, in eval mode.

    Args:
        source: a `.safetensors`, `.pth`, `.pt`, `.bin` or `.npz` file, a folder, a run, or a hub id
            (`google/vit-base-patch16-224`).
        dialect: a row of DIALECTS (default: recognised from the names of the tensors).
        revision: branch, tag or commit on the hub (default: the main branch).
        rename: new names for tensors, regular expression -> replacement, applied in order as by `re.sub`; a tensor
            whose name becomes empty is left out.
        key: where a PyTorch file that holds more than weights keeps them, such as `student` (default: a teacher or an
            average before the rest).
        dtype: data type of the weights (default: that of the file).
        device: where the weights go: a device of torch, or `auto` for CUDA if available, then MPS, then the CPU
            (default: the CPU).
        backbone: where the backbone of a LoRA file is (default: where the file says).
        overrides: changes (`image_size`, `num_channels`, `num_classes`), facts that the file does not state
            (`num_attention_heads`, `layer_norm_eps`, `hidden_act`, ...), and fields of InputSpec (`mean`, `std`,
            `class_names`, ..., or a complete `input_spec`).

    Raises:
        CheckpointError: the file cannot be read, or does not hold such a model; the message says why.
        ConfigError: an override that is unknown or does not fit.

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", num_classes=3, num_hidden_layers=1)
        >>> vitkit.load(vitkit.save(model, "tiny.safetensors")).config == model.config
        True
    """
    checkpoint = open_checkpoint(
        source, dialect=dialect, revision=revision, rename=rename, key=key, backbone=backbone, **overrides
    )
    for note in checkpoint.notes:
        log.warning("%s: %s", checkpoint.files.label, note)
    return build(checkpoint, dtype, device)


def build(
    checkpoint: Checkpoint, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> Backbone:
    """Build the model of an opened checkpoint; its parameters are the file's tensors, not copies of them."""
    if device == AUTO:
        device = find_device(AUTO)
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ConfigError(f"dtype must be a type of torch, such as float32 or bfloat16; got {dtype!r}.")
        dtype = found
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype must be a floating-point type, such as float32 or bfloat16; got {dtype}.")
    c = checkpoint.config
    depth = sum(c.depths) if isinstance(c, ResNetConfig) else c.num_hidden_layers
    if depth > len(checkpoint.state):  # said before as many blocks are built
        raise TensorMismatch(
            f"Expected {depth:,} blocks, as the configuration states; the file holds {len(checkpoint.state)} tensors. "
            f"The file and its configuration do not belong together."
        )
    model = skeleton(checkpoint.config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    check(checkpoint.state, expected, checkpoint.dialect)
    state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in checkpoint.state.items()}
    fill(model, state)
    model.input_spec, model.licence, model.known = checkpoint.input_spec, checkpoint.licence, checkpoint.known
    return model.eval()


def open_checkpoint(
    source: str | Path,
    *,
    dialect: str | None = None,
    revision: str | None = None,
    rename: Mapping[str, str] | None = None,
    key: str | None = None,
    backbone: str | Path | None = None,
    **overrides: Any,
) -> Checkpoint:
    """Read a source and say what it holds, without building a model. The arguments are those of `load`."""
    of_model, of_input = _split(overrides)
    rows = every_dialect(dialect)
    files, notes = find(source, revision), list[str]()
    tensors, metadata = containers.read(files.weights, key=key, notes=notes)
    if backbone is not None and adapters.KEY not in metadata:
        raise ConfigError(f"backbone= (--backbone) is for LoRA files; {files.label} is not one. Leave it out.")
    described = sidecar.understand(metadata.get("vitkit", "")) if dialect in (None, "native") else None
    if adapters.KEY in metadata:
        lora = adapters.understand(metadata[adapters.KEY], files.weights)
        state = adapters.merged(files.weights, lora, tensors, str(backbone) if backbone else None, open_checkpoint)
        found = Checkpoint(
            files, DIALECTS["native"], lora.config, lora.input_spec, state, len(tensors), licence=lora.licence
        )
    elif described is not None:  # a native file says everything itself
        config, spec, extra, licence = described
        native = (RESNET_DIALECTS if isinstance(config, ResNetConfig) else DIALECTS)["native"]
        left_out = [name for name in tensors if name.startswith(PRETRAINING)]
        state = {name: tensor for name, tensor in tensors.items() if name not in left_out}
        known = Known.from_text(extra.pop("known")) if "known" in extra else None
        found = Checkpoint(
            files, native, config, spec, state, len(tensors), left_out, extra=extra, licence=licence, known=known
        )
    else:
        if "vitkit" in metadata:
            notes.append("The file's own description cannot be read by this version; it is ignored.")
        architectures.refuse(str((files.config or {}).get("architecture", "")))
        names = _renamed(tensors, rename, notes) if rename else {name: name for name in tensors}
        row, names = identify(names, rows, _origin(files), notes)
        state, hints, unused = _translated(files, row, tensors, names, notes)
        beside = sidecar.read(files.weights, notes)
        config, spec = _understood(files, row, beside, state, hints, of_model, of_input, notes)
        licence = (beside and beside[2]) or licence_of(files, metadata)
        found = Checkpoint(files, row, config, spec, state, len(tensors), unused, notes, {}, names, key, licence)
    if odd := [name for name, tensor in found.state.items() if not tensor.is_floating_point()]:
        raise TensorMismatch(
            f"Expected floating-point weights; {found.dialect.in_file(odd[0])!r} is {found.state[odd[0]].dtype}. "
            f"Quantized files are not supported."
        )
    return _changed(found, of_model, of_input) if of_model or of_input else found


def _split(overrides: Fields) -> tuple[Fields, Fields]:
    """Separate the overrides of the model from those of its input; refuse unknown ones by name."""
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
    of_model = {name: value for name, value in overrides.items() if name in CHANGES + FACTS}
    return of_model, {name: value for name, value in overrides.items() if name not in of_model}


def _renamed(names: Iterable[str], rename: Mapping[str, str], notes: list[str]) -> dict[str, str]:
    """Apply the user's table; return each name in the file -> its new name, without the tensors it leaves out."""
    result = {name: name for name in names}
    for pattern, replacement in rename.items():
        try:
            changed = {old: re.sub(pattern, replacement, new) for old, new in result.items()}
        except re.error as error:
            raise ConfigError(f"rename must map regular expressions; {pattern!r} is not valid: {error}.") from None
        if changed == result:
            raise ConfigError(
                f"rename must map names in the file; none of them contains {pattern!r}. They are {few(list(result))}."
            )
        result = changed
    if left_out := [old for old, new in result.items() if not new]:
        notes.append(f"rename leaves out {len(left_out)} tensors: {few(left_out)}.")
    return {old: new for old, new in result.items() if new}


def _origin(files: Files) -> str:
    """Quote what config.json says about where a file comes from."""
    said = {name: files.config.get(name) for name in ("model_type", "architecture")} if files.config else {}
    return "".join(f" (config.json: {name} {value!r})" for name, value in said.items() if value)


def _translated(
    files: Files, row: Dialect, tensors: dict[str, Tensor], names: dict[str, str], notes: list[str]
) -> tuple[dict[str, Tensor], Fields, list[str]]:
    """Translate the tensors of a file; return them, the fields that their names reveal, and the unused ones."""
    if (pieces := [old for old, new in names.items() if row.pieces([new])]) and (
        ".safetensors" in files.weights.suffixes
    ):
        # These are copied into our tensors. Read through a mapping of their own, which is released with them, they
        # are not in memory twice.
        tensors = tensors | containers.read(files.weights, pieces)[0]
    state, hints, unused = row.read({new: tensors[old] for old, new in names.items()})
    if unused:
        notes.append(f"Left out of the model: {row.left_out(unused)}.")
    return state, hints, unused


def _understood(
    files: Files,
    row: Dialect,
    beside: tuple[Config, InputSpec, str] | None,
    state: dict[str, Tensor],
    hints: Fields,
    of_model: Fields,
    of_input: Fields,
    notes: list[str],
) -> tuple[Config, InputSpec]:
    """Find the configuration and the InputSpec of a file that does not describe itself.

    Args:
        files: where it is.
        row: its dialect.
        beside: what its sidecar says.
        state: tensors by the model's names; their positions are brought into the model's form.
        hints: fields that the names of the tensors reveal.
        of_model: the user's overrides; heads and image size may be needed to understand the file.
        of_input: the user's overrides; receives the stated class names if they fit the number of classes asked for.
        notes: receives a sentence for each assumption.
    """
    stated, prepared = hints, Fields()
    if beside is not None:
        stated, prepared = stated | vars(beside[0]), dict(vars(beside[1]))
    preset = preprocessing_presets.preprocessing(files.label, files.weights.name)
    if files.config is not None:
        fields, prepared_there = external_configs.read_json(files.config, files.preprocessor, notes)
        fields = _of_resnet(fields) if row in RESNET_DIALECTS.values() else fields
        stated, prepared = stated | fields, prepared | prepared_there
    elif beside is None and preset is None:
        assumed_numerics = NUMERICS[row.numerics] if row in DIALECTS.values() else {"standardisation": row.numerics}
        numerics = ", ".join(f"{name} {value}" for name, value in assumed_numerics.items())
        notes.append(f"The file does not state its numerics; those of {row.name} are assumed ({numerics}).")
    config: Config
    if row in RESNET_DIALECTS.values():
        config = infer_resnet(state, row, stated, of_model)
        defaults = preprocessing_presets.RESNET_DEFAULTS
    else:
        config, defaults = infer(state, row, stated, of_model, notes), preprocessing_presets.DEFAULTS
    complete_positions(state, config)
    usual = preset.spec if preset is not None else defaults[row.name]
    if of_input.get("resize") == "squash":
        prepared["crop"] = 1.0
    assumed = [name for name in usual if name not in prepared and name not in of_input]
    if preset is None and assumed and "input_spec" not in of_input:
        values = ", ".join(f"{name} {_shown(usual[name])}" for name in assumed)
        notes.append(
            f"The file does not state how its images were prepared; {row.name}'s usual way is assumed: {values}. If it "
            f"was different, give {'=, '.join(assumed)}= ({', '.join(f'--{name}' for name in assumed)}): wrong values "
            f"lower the accuracy."
        )
    prepared = usual | prepared
    names = prepared.get("class_names", ())
    if len(names) != config.num_classes:
        if names and len(names) == of_model.get("num_classes"):
            of_input.setdefault("class_names", names)
        prepared.pop("class_names", None)
    if len(prepared.get("thresholds", ())) != config.num_classes:
        prepared.pop("thresholds", None)
    return config, _input_spec(config, {"size": config.image_hw, **prepared})


def _of_resnet(fields: Fields) -> Fields:
    """Keep the fields that ResNetConfig has."""
    known = {f.name for f in dataclasses.fields(ResNetConfig)}
    return {name: value for name, value in fields.items() if name in known}


def _shown(value: Any) -> str:
    return "/".join(f"{part:g}" for part in value) if isinstance(value, tuple) else str(value)


def _changed(found: Checkpoint, of_model: Fields, of_input: Fields) -> Checkpoint:
    """Apply the user's overrides to a checkpoint."""
    own, changes = found.config, dict(of_model)
    if isinstance(own, ResNetConfig):
        if odd := [name for name in changes if name not in _of_resnet(changes)]:
            raise ConfigError(f"This file holds a ResNet, which has no {', '.join(odd)}; leave it out.")
    else:
        if changes.get("num_classes", own.num_classes) != own.num_classes:
            changes.setdefault("pre_logits", False)  # fine-tuning replaces the whole head (section 3.1)
            changes["without_bias"] = tuple(name for name in own.without_bias if name != "head")
        if changes.get("pre_logits") and not own.pre_logits:
            raise ConfigError("pre_logits=True asks for a layer that this file does not have.")
        if changes.get("pool") == "cls":
            changes.setdefault("norm_after_pool", False)
    config = dataclasses.replace(own, **changes)
    adapt(found.state, own, config, found.notes)
    if "input_spec" in of_input:
        spec: InputSpec = of_input["input_spec"]
    else:
        fields = dict(vars(found.input_spec))
        if own.image_hw != config.image_hw or "image_size" in changes:
            fields["size"] = config.image_hw
        if own.num_classes != config.num_classes:
            fields["class_names"] = fields["thresholds"] = ()
        if own.num_channels != config.num_channels:
            del fields["channels"]
        if of_input.get("resize") == "squash":
            fields["crop"] = 1.0
        spec = _input_spec(config, fields | of_input)
    return dataclasses.replace(
        found, config=config, input_spec=spec.check(config), known=_still_known(found, config, spec)
    )


def _still_known(found: Checkpoint, config: Config, spec: InputSpec) -> Known | None:
    """Return what is known about the classes if it still holds for a changed model; otherwise say so."""
    if found.known is None or config.num_classes != found.config.num_classes:
        return None  # other classes
    if any(spec.to_dict()[name] != value for name, value in found.known.preprocessing.items()):
        found.notes.append(
            'The model cannot answer "none of these" with this preprocessing: its limit was chosen with another one.'
        )
        return None
    return found.known


def _input_spec(config: Config, fields: Fields) -> InputSpec:
    """Build the InputSpec of a model from fields that may have been made for another number of channels."""
    base = InputSpec.of(config)
    fields = {**vars(base), **fields}
    for name in ("mean", "std"):
        if not isinstance(fields[name], Sequence):
            fields[name] = (fields[name],) * config.num_channels
        elif len(fields[name]) != config.num_channels:
            # statistics of other channels: use their mean for each channel
            for value in fields[name] or ("nothing",):
                checks.number(name, value, -math.inf)
            fields[name] = (round(sum(fields[name]) / len(fields[name]), 6),) * config.num_channels
            fields["channels"] = base.channels
    return InputSpec(**fields).check(config)


def _numerics(config: Config) -> Fields:
    """Return the fields in which libraries that have the same model differ."""
    if isinstance(config, ResNetConfig):
        return {"standardisation": config.standardisation}
    found = {name: getattr(config, name) for name in NUMERICS["paper"]}
    return found | ({"standardisation": config.standardisation} if config.stem != "none" else {})


def inspect(source: str | Path, **arguments: Any) -> dict[str, Any]:
    """Say what a checkpoint holds, as JSON-compatible values.

    Args:
        source: as for `load`.
        arguments: as for `load`.

    Returns:
        dialect, variant, tensors, parameters, dtype, numerics, heads, image and patch size, classes, InputSpec,
        licence, notes, sha256.
    """
    found = open_checkpoint(source, **arguments)
    config, spec, held = found.config, found.input_spec.to_dict(), sum(t.numel() for t in found.state.values())
    if held != (wanted := parameters(config)):  # whoever loads it is told by name
        found.notes.append(f"It cannot be loaded: it holds {held:,} parameters, where such a model has {wanted:,}.")
    names = spec.pop("class_names")
    return {
        "source": str(source),
        "file": str(found.files.weights),
        "dialect": found.dialect.name,
        "variant": variant_of(config),
        "tensors": found.tensors,
        "unused": found.unused,
        "parameters": held,
        "dtype": ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in found.state.values()})),
        "numerics": _numerics(config),
        "config": config.to_dict(whole=True),
        "input_spec": spec,
        "classes": config.num_classes,
        "class_names": names,
        "licence": found.licence,
        "extra": found.extra,
        "notes": found.notes,
        "sha256": sidecar.sha256(found.files.weights),
    }
