"""What a model consists of: every module with its shapes and parameters.

Nothing is computed: the model runs on the meta device, where tensors have shapes but no values.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.model.backbone import Backbone, Config
from vitkit.model.config import ViTConfig
from vitkit.model.count import flops, parameters
from vitkit.model.create import build
from vitkit.model.parts.fit import unfit
from vitkit.model.vit import ViT

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module, or one parameter that belongs to a module with submodules, such as the class token.

    Args:
        name: path inside the model (`blocks.0.msa.qkv`); empty for the model itself.
        kind: its class.
        input: shape of its input; None for a parameter.
        output: shape of its output; for a parameter, its shape.
        parameters: number of parameters, including those of its submodules.
        trainable: whether any parameter is trainable; None for a module without parameters.
    """

    name: str
    kind: str
    input: Shape | None
    output: Shape | None
    parameters: int
    trainable: bool | None

    @property
    def depth(self) -> int:
        """Return the number of modules that contain this one."""
        return self.name.count(".") + 1 if self.name else 0


def _shape(value: Any) -> Shape:
    while not isinstance(value, Tensor) and not isinstance(value[0], int):  # of several results the first
        value = value[0]
    return tuple(value.shape if isinstance(value, Tensor) else value)


def meta(config: Config, batch: int = 1) -> tuple[Backbone, Tensor]:
    """Return a model and a batch of images of its size, both on the meta device."""
    with torch.device("meta"):
        return build(config).eval(), torch.empty(batch, config.num_channels, *config.image_hw)


def describe(config: Config, batch: int = 1) -> list[Row]:
    """List every module of a model, in the order in which an image passes through them.

    Args:
        config: the architecture.
        batch: batch size B of the shapes (default: 1).
    """
    model, x = meta(config, batch)
    if isinstance(model, ViT):
        model.pool.rows = None  # show all tokens in the last block too, not only those that Eq. 4 reads
    return rows_of(model, x)


def differences(config: Config) -> str:
    """Return a sentence that names the parts of a ViT that are not the paper's; empty if there are none."""
    odd = unfit(config, {}) if isinstance(config, ViTConfig) else []
    return f"Parts that are not the paper's: {', '.join(odd)}." if odd else ""


def rows_of(model: nn.Module, x: Tensor) -> list[Row]:
    """List every module of a model of any interface, in the order in which an image passes through them.

    The parameters of a row are the sum of those of the rows directly inside it.

    Args:
        model: the model, on the meta device.
        x: images, on the meta device.
    """
    entered: dict[nn.Module, tuple[int, Shape]] = {}  # when each module was called first, and with which shape
    left: dict[nn.Module, Shape] = {}

    def enter(module: nn.Module, given: Any) -> None:
        entered.setdefault(module, (len(entered), _shape(given)))

    def leave(module: nn.Module, _given: Any, result: Any) -> None:
        left.setdefault(module, _shape(result))

    for module in model.modules():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    model(x)

    def call(module: nn.Module) -> tuple[int, Shape, Shape] | None:
        """Return when a module was called, its input and its output; None if it never was."""
        if module in entered:
            return *entered[module], left[module]
        parts = sorted(filter(None, map(call, module.children())))  # a list of modules: from its first to its last
        return (*parts[0][:2], parts[-1][2]) if parts else None

    def rows(module: nn.Module, name: str) -> Iterator[Row]:
        called, parameters = call(module), list(module.parameters())
        if (called is None and not parameters) or (isinstance(module, nn.Identity) and name != "head"):
            return  # nn.Identity stands where the paper has no part
        yield Row(
            name=name,
            kind=type(module).__name__,
            input=called and called[1],
            output=called and called[2],
            parameters=sum(p.numel() for p in parameters),
            trainable=any(p.requires_grad for p in parameters) if parameters else None,
        )
        before = f"{name}." if name else ""
        children = list(module.named_children())
        for own, p in module.named_parameters(recurse=False) if children else ():
            yield Row(
                name=before + own,
                kind="Parameter",
                input=None,
                output=tuple(p.shape),
                parameters=p.numel(),
                trainable=p.requires_grad,
            )
        for own, child in sorted(children, key=lambda part: call(part[1]) or (len(entered),)):
            yield from rows(child, before + own)

    return list(rows(model, ""))


@dataclass(frozen=True)
class Summary:
    """What `vitkit.summary` returns: the rows of a model, as text or as a table in a notebook.

    Args:
        config: the architecture.
        rows: its modules.
    """

    config: Config
    rows: list[Row]

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return parameters(self.config)

    def cells(self) -> list[tuple[str, str, str, str, str]]:
        """Name, class, input, output and parameters of every row."""
        return [
            (
                "  " * row.depth + (row.name.rpartition(".")[2] or row.kind),
                row.kind,
                "" if row.input is None else str(list(row.input)),
                "" if row.output is None else str(list(row.output)),
                f"{row.parameters:,}" if row.parameters else "",
            )
            for row in self.rows
        ]

    def __str__(self) -> str:
        table = [("module", "class", "input", "output", "parameters"), *self.cells()]
        widths = [max(len(row[i]) for row in table) for i in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        lines.append(f"{self.parameters:,} parameters, {flops(self.config) / 1e9:,.1f} GFLOPs per image")
        return "\n".join(filter(None, [*lines, differences(self.config)]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("module", "class", "input", "output", "parameters"))
        body = "".join(
            "<tr>" + "".join(f"<td><pre>{html.escape(cell)}</pre></td>" for cell in row) + "</tr>"
            for row in self.cells()
        )
        return f"<table><tr>{head}</tr>{body}</table><p>{self.parameters:,} parameters</p>"
