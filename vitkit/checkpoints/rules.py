"""A dialect: a table of rules between the model's tensors and the names and layouts in a file.

Legend: D width, h heads, d = D / h, P patch side, C channels, i block. Each rule works in both directions, and every
tensor is accounted for on both sides: a tensor that no rule uses is an error unless the dialect lists it as unused.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CannotExpress, TensorMismatch
from vitkit.model.backbone import Config
from vitkit.model.checks import brief
from vitkit.model.config import ViTConfig

Tensors = dict[str, Tensor]
ASIDE = "unused/"  # `prepare` puts this in front of tensors that this file has but its model does not use


@dataclass(frozen=True)
class Form:
    """The layout of one of our tensors in a file: in one or several pieces, with the axes in another order.

    Args:
        read: the file's pieces -> our tensor.
        write: our tensor, config -> the file's pieces.
    """

    read: Callable[..., Tensor]
    write: Callable[[Tensor, Any], Sequence[Tensor]]


def _stack_kernels(*qkv: Tensor) -> Tensor:
    return torch.cat([kernel.flatten(1).T for kernel in qkv])  # 3 x [D, h, d] -> [3 h d, D]


def _split_kernels(weight: Tensor, c: Any) -> list[Tensor]:
    return [part.T.unflatten(1, (-1, c.head_size)) for part in weight.chunk(3)]


SAME = Form(lambda t: t, lambda t, c: (t,))
THREE = Form(lambda *qkv: torch.cat(qkv), lambda t, c: t.chunk(3))  # q, k, v, each [h d, D]
DENSE = Form(lambda kernel: kernel.T, lambda weight, c: (weight.T,))  # [in, out] -> [out, in]
CONV = Form(lambda k: k.permute(3, 2, 0, 1), lambda w, c: (w.permute(2, 3, 1, 0),))  # [P, P, C, D] -> [D, C, P, P]
QKV_KERNEL = Form(_stack_kernels, _split_kernels)
QKV_BIAS = Form(
    lambda *qkv: torch.cat([bias.flatten() for bias in qkv]),  # 3 x [h, d] -> [3 h d]
    lambda t, c: [part.unflatten(0, (-1, c.head_size)) for part in t.chunk(3)],
)
OUT_KERNEL = Form(
    lambda kernel: kernel.flatten(0, 1).T,  # [h, d, D] -> [D, h d]
    lambda weight, c: (weight.T.unflatten(0, (-1, c.head_size)),),
)
TWO = Form(lambda *two: torch.cat(two), lambda t, c: t.chunk(2))  # gate and value, or k and v
TOKEN = Form(lambda t: t.reshape(1, 1, -1), lambda t, c: (t.flatten(),))  # [D] -> [1, 1, D]
TABLE = Form(lambda t: t[None] if t.dim() == 2 else t, lambda t, c: (t[0],))  # [N, D] -> [1, N, D]


@dataclass(frozen=True)
class Rule:
    """One tensor of the model and where a file keeps it.

    Args:
        ours: name in the model's state dict; `{i}` stands for the block's number.
        theirs: name or names in the file; `{i+1}` stands for that number counted from 1, `{i+1:02}` with two digits.
        form: its layout in the file.
    """

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME


def same(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Return the rule of a tensor that only changes its name."""
    return (Rule(ours, (theirs,)),)


def both(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Return the rules of a weight and a bias that only change their names."""
    return tuple(Rule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in ("weight", "bias"))


def three(ours: str, *theirs: str) -> tuple[Rule, ...]:
    """Return the rules of the weight and bias of U_qkv in files that keep q, k and v separately."""
    return tuple(
        Rule(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), THREE) for kind in ("weight", "bias")
    )


def weights(ours: str, *theirs: str) -> tuple[Rule, ...]:
    """Return the rule of U_qkv's weight in files that keep q, k and v separately; biases have rules of their own."""
    return (Rule(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), THREE),)


def two(ours: str, *theirs: str) -> tuple[Rule, ...]:
    """Return the rules of the weight and bias of a layer that files keep in two halves."""
    return tuple(Rule(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), TWO) for kind in ("weight", "bias"))


def packed(tensors: Mapping[str, Tensor], gate: str, value: str, both: str) -> Tensors:
    """Put gates and values of a gated MLP into one tensor each, as the model has them.

    Args:
        tensors: by name.
        gate: part of the gates' names, such as `.gate_proj.`.
        value: part of the values' names.
        both: part of the new names.
    """
    result, gated = Tensors(), any(gate in name for name in tensors)
    for name, tensor in tensors.items():
        if gated and (gate in name or value in name):
            names = [name.replace(value, gate), name.replace(gate, value)]
            if missing := [part for part in names if part not in tensors]:
                raise TensorMismatch(f"The file has {name!r} but lacks {few(missing)}; it is incomplete.")
            if value in name:
                result[name.replace(value, both)] = torch.cat([tensors[names[0]], tensor])
        else:
            result[name.replace(value, both)] = tensor
    return result


def unpacked(tensors: Mapping[str, Tensor], gate: str, value: str, both: str, *, gated: bool) -> Tensors:
    """Undo `packed`; without a gate, the one tensor gets the values' name."""
    result = Tensors()
    for name, tensor in tensors.items():
        if both in name and gated:
            result[name.replace(both, gate)], result[name.replace(both, value)] = tensor.chunk(2)
        else:
            result[name.replace(both, value)] = tensor
    return result


# Tensors of other architectures, in any dialect: regular expression -> what they are.
REFUSED: dict[str, str] = {
    r"^to_patch_embedding\.": "vit-pytorch's LayerNorm on raw patches, before E of Eq. 1",
    r"dist_token|head_dist\b|distillation_token|distillation_classifier|cls_classifier": "a distillation token (DeiT)",
    r"attn_pool\.|MAPHead": "a MAP head (attention pooling)",
    r"mlp\.(w12|w3|weights_in|weights_out|fc1_g|fc1_x)\b": "a SwiGLU MLP",
    r"norm_pre\.|ln_pre\.|pre_layrnorm": "a LayerNorm before the first block (CLIP)",
    r"post_?norm|norm\d?_post|ln_post": "LayerNorms after the branches (post-norm)",
    r"attn\.norm\.|mlp\.norm\.|[qk]_norm\.": "extra LayerNorms inside a block",
    r"blocks\.\d+\.(attns|ffns|in_proj)\.": "parallel branches in a block",
    r"\.lambda_[qk][12]$": "differential attention",
    r"rope|relative_position|rel_pos": "rotary or relative positions",
    r"attn\.[qv]_bias": "separate q and v biases (BEiT)",
    r"patch_embed\.backbone\.(conv1|bn1|layer\d|\d)": "a stem other than the authors' ResNet",
    r"patch_embeddings\.backbone\.": "a ResNet stem in the spelling of transformers (ViTHybrid)",
}


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One public spelling of the same Vision Transformer.

    Args:
        name: its row in DIALECTS.
        numerics: its row in NUMERICS: what its own library computes with.
        suffixes: suffixes of the files it is written to; an empty string stands for a folder.
        signature: names that every file of this dialect has, after `respell`.
        unless: excludes files that fit the signature but belong to a related dialect.
        rules: the table.
        respell: other spellings of this dialect, regular expression -> the table's spelling.
        prepare: before reading, brings other structures of this dialect into the form that `rules` expects.
        finish: after writing, adds what depends on more than one tensor.
        hints: fields of ViTConfig that the file's names and shapes reveal and the translated tensors do not; and
            `untold`: what they reveal that only a name or a configuration can explain.
        prefix_positions: whether its file of a model has a row of positions for the class token (default: always).
        later: whether its files hold parts that the paper does not have; their names, or `hints`, tell which.
        needs: fields of ViTConfig that neither tensors nor numerics tell: without a config.json they must be given.
        unused: tensors that belong to the dialect but not to the model, regular expression -> what they are.
        refused: tensors of other architectures, regular expression -> what they are.
    """

    name: str
    numerics: str
    suffixes: tuple[str, ...]
    signature: tuple[str, ...]
    rules: tuple[Rule, ...]
    unless: Callable[[AbstractSet[str]], bool] = lambda names: False
    respell: tuple[tuple[str, str], ...] = ()
    prepare: Callable[[Tensors], Tensors] = lambda tensors: tensors
    finish: Callable[[Tensors, Any], Tensors] = lambda tensors, config: tensors
    hints: Callable[[Mapping[str, Tensor]], dict[str, Any]] = lambda tensors: {}
    prefix_positions: Callable[[ViTConfig], bool] = lambda config: True
    later: bool = False
    needs: tuple[str, ...] = ()
    unused: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=lambda: REFUSED)

    def spelled(self, name: str) -> str:
        """Return a tensor's name in the table's spelling."""
        return _respelled(self.respell, name)

    def recognises(self, names: Iterable[str]) -> bool:
        """Whether a file with these tensor names has this dialect."""
        spelled = {self.spelled(name) for name in names}
        return spelled.issuperset(self.signature) and not self.unless(spelled)

    def pieces(self, names: Iterable[str]) -> list[str]:
        """Return the names that are only part of one of our tensors (q, k and v, if the file separates them)."""
        patterns = [_pattern(piece) for rule in self.rules if len(rule.theirs) > 1 for piece in rule.theirs]
        return [name for name in names if any(pattern.fullmatch(self.spelled(name)) for pattern in patterns)]

    def fits(self, name: str) -> bool:
        """Whether a tensor of this name has a place in this dialect."""
        spelled = self.spelled(name)
        if _found(self.unused, spelled):
            return True
        return any(_pattern(piece).fullmatch(spelled) for rule in self.rules for piece in rule.theirs)

    def in_file(self, ours: str) -> str:
        """Return the name that this dialect gives to one of our tensors, for messages."""
        for rule in self.rules:
            if match := _pattern(rule.ours).fullmatch(ours):
                return ", ".join(_at(name, match.groupdict().get("i") or "") for name in rule.theirs)
        return ours

    def read(self, tensors: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Any], list[str]]:
        """Translate a file's tensors into the model's.

        Args:
            tensors: everything that the file holds.

        Returns:
            The model's tensors; the fields of ViTConfig that the names reveal; the names of tensors that are accounted
            for but not used.

        Raises:
            CannotExpress: the file holds an architecture that vitkit does not support.
            TensorMismatch: a tensor that no rule uses, or whose shape its rule cannot use.
        """
        for name in tensors:
            refuse(name, self.refused)
        spelled = {self.spelled(name): tensor for name, tensor in tensors.items()}
        if len(spelled) != len(tensors):
            names = [self.spelled(name) for name in tensors]
            raise TensorMismatch(
                f"Expected each tensor once; the file holds {next(n for n in names if names.count(n) > 1)!r} twice, "
                f"under two names."
            )
        try:
            hints, left = self.hints(spelled), self.prepare(spelled)
        except (RuntimeError, IndexError, KeyError) as error:
            raise TensorMismatch(
                f"The tensors do not have the shapes of the {self.name} dialect ({str(error).splitlines()[0][:200]})."
            ) from None
        found, there = Tensors(), set(left)
        for rule in self.rules:
            for i in dict.fromkeys(i for name in rule.theirs for i in _blocks(name, left)):
                names = [_at(name, i) for name in rule.theirs]
                if missing := [name for name in names if name not in left]:
                    if missing == names[1:2] and missing[0].endswith("bias") and not _blocks(rule.theirs[1], there):
                        raise CannotExpress(
                            f"This checkpoint has biases for queries and values but not for keys (BEiT), which vitkit "
                            f"does not support: there is no {missing[0]!r}."
                        )
                    other = next(name for name in names if name in left)
                    raise TensorMismatch(f"The file has {other!r} but lacks {few(missing)}; it is incomplete.")
                parts = [left.pop(name) for name in names]
                try:
                    found[_at(rule.ours, i)] = rule.form.read(*parts).contiguous()
                except (RuntimeError, IndexError):
                    shapes = ", ".join(str(list(part.shape)) for part in parts)
                    raise TensorMismatch(
                        f"{few(names)} of shape {shapes} cannot be read as {_at(rule.ours, i)!r} in the "
                        f"{self.name} dialect."
                    ) from None
        unused = [name for name in left if name.startswith(ASIDE) or _found(self.unused, name)]
        if extra := [name for name in left if name not in unused]:
            raise TensorMismatch(
                f"Expected only tensors of the {self.name} dialect; the file holds {len(extra)} others: {few(extra)}. "
                f"If they are part of this model, rename them (rename=, --rename); otherwise vitkit does not support "
                f"its architecture."
            )
        return found, hints, [name.removeprefix(ASIDE) for name in unused]

    def left_out(self, unused: Sequence[str]) -> str:
        """Say what tensors that are not used are, for a note: `a text tower (12 tensors), a mask token (1 tensor)`."""
        what = Counter(_found(self.unused, name) or "parts that this classifier does not use" for name in unused)
        return ", ".join(f"{kind} ({count} tensor{'s' * (count > 1)})" for kind, count in what.items())

    def written(self, config: Config) -> Config:
        """Return the configuration that a model has once it is written: with the positions that its file has."""
        if not isinstance(config, ViTConfig):
            return config
        return dataclasses.replace(config, prefix_positions=self.prefix_positions(config))

    def write(self, state: Mapping[str, Tensor], config: Config) -> Tensors:
        """Translate the model's tensors into a file's; each of them must have a rule."""
        left, result, config = dict(state), Tensors(), self.written(config)
        complete_positions(left, config)
        for rule in self.rules:
            for i in _blocks(rule.ours, left):
                parts = rule.form.write(left.pop(_at(rule.ours, i)), config)
                for name, part in zip(rule.theirs, parts, strict=True):
                    result[_at(name, i)] = part
        if left:
            raise CannotExpress(f"The {self.name} dialect has no place for {few(list(left))}.")
        return self.finish(result, config)


def complete_positions(state: Tensors, config: Config) -> None:
    """Bring positions into the form of a model, in place: one row for the class token if it has positions for tokens
    before the patches, none for registers.

    timm may keep rows for registers; here they are added to the registers. Likewise, the class token's row is added to
    the token if the model has none; if only the model has one, it is zero.

    Args:
        state: tensors by the model's names.
        config: the model they are for, with the image size of the tensors.
    """
    table = state.get("positions.table")
    if table is None or table.dim() != 3 or not isinstance(config, ViTConfig):
        return
    n = int(config.class_token)
    extra = table.shape[1] - config.num_patches
    if config.num_register_tokens and extra == config.num_prefix_tokens:
        state["register_tokens"] = state["register_tokens"] + table[:, n:extra]
        table, extra = torch.cat([table[:, :n], table[:, extra:]], dim=1), n
    if n and extra == 0 and config.prefix_positions:
        table = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
    elif "class_token" in state and extra == n and not config.prefix_positions:
        state["class_token"] = state["class_token"] + table[:, :n]
        table = table[:, n:]
    state["positions.table"] = table


def check(state: Mapping[str, Tensor], expected: Mapping[str, torch.Size], dialect: Dialect) -> None:
    """Check that no tensor is missing or left over, and that every shape is right.

    Args:
        state: tensors by the model's names.
        expected: the shape of each of the model's tensors.
        dialect: the spelling that messages use.

    Raises:
        TensorMismatch: names the tensors and both shapes.
    """
    if missing := [name for name in expected if name not in state]:
        raise TensorMismatch(
            f"The file lacks {len(missing)} of the model's {len(expected)} tensors: "
            f"{few([dialect.in_file(name) for name in missing])}. It is incomplete, or has another architecture than "
            f"stated."
        )
    if extra := [name for name in state if name not in expected]:
        raise TensorMismatch(
            f"The file holds {len(extra)} tensors that the model as configured does not have: "
            f"{few([dialect.in_file(name) for name in extra])}."
        )
    for name, shape in expected.items():
        if state[name].shape != shape:
            raise TensorMismatch(
                f"Expected {dialect.in_file(name)!r} to have shape {list(shape)} ({name}); got "
                f"{list(state[name].shape)}. The file and its configuration do not belong together."
            )


def refuse(name: str, patterns: Mapping[str, str]) -> None:
    """Raise CannotExpress if a tensor of this name belongs to one of the architectures in `patterns`."""
    if what := _found(patterns, name):
        raise CannotExpress(
            f"This checkpoint has {what}, which vitkit does not support: tensor {name!r}. Use a checkpoint without it."
        )


def _found(patterns: Mapping[str, str], name: str) -> str:
    """Return the value of the first pattern that is found in the name, or an empty string."""
    return next((what for pattern, what in patterns.items() if re.search(pattern, name)), "")


@functools.lru_cache(maxsize=8192)
def _respelled(respell: tuple[tuple[str, str], ...], name: str) -> str:
    for pattern, replacement in respell:
        name = re.sub(pattern, replacement, name)
    return name


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    def number(match: re.Match[str]) -> str:  # only spellings that `_at` gives back
        spelled = rf"\d{{{match['digits']}}}" if match["digits"] else r"[1-9]\d*" if match["shift"] else r"\d+"
        return f"(?P<i>{spelled})"

    return re.compile(NUMBER.sub(number, re.escape(name)))


# {i}, {i+1} or {i+1:02} in a template, as re.escape leaves them or as they are
NUMBER = re.compile(r"\\?\{i(?:\\?\+(?P<shift>1))?(?::0(?P<digits>\d))?\\?\}")


def _at(template: str, i: str) -> str:
    """Put our number of a block into a template."""

    def number(match: re.Match[str]) -> str:
        if not match["shift"]:
            return i
        return str(int(i) + 1).zfill(int(match["digits"] or 1))

    return NUMBER.sub(number, template)


def _blocks(template: str, names: AbstractSet[str] | Mapping[str, Tensor]) -> list[str]:
    """List our numbers of the blocks for which the template is among the names; [""] or [] if it has no number."""
    if (number := NUMBER.search(template)) is None:
        return [""] if template in names else []
    pattern = _pattern(template)
    found = [match["i"] for name in list(names) if (match := pattern.fullmatch(name))]
    return [str(int(i) - 1) for i in found] if number["shift"] else found


def few(names: Sequence[str], count: int = 4) -> str:
    """List the first names, and say how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(brief(name) for name in names[:count]) + more
