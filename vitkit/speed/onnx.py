"""ONNX files: one graph for any batch size and any image size, run by ONNX Runtime."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import UnreadableFile
from vitkit.model.resnet_config import ResNetConfig
from vitkit.optional import library
from vitkit.speed.graph import Graph
from vitkit.types import Array

KEY = "vitkit"  # metadata key of the file's card
SIDES = ("batch", "channels", "height", "width")


def example(graph: Graph) -> tuple[tuple[Tensor], dict[str, dict[int, Any]]]:
    """Return pixels to trace a graph with, and which of their dimensions vary."""
    c, auto = graph.config, torch.export.Dim.DYNAMIC
    if isinstance(c, ResNetConfig):
        sides = [max(side, 64) if graph.any_size else side for side in c.image_hw]
    else:
        least = 2 if graph.any_size else 1  # the exporter would take a side of one patch for a constant
        sides = [max(side, least) * c.patch_size for side in c.grid]
    x = torch.zeros(2, c.num_channels, *sides)
    return (x,), {"x": {0: auto, 2: auto, 3: auto} if graph.any_size else {0: auto}}


def write(graph: Graph, path: Path, card: str, pixels: Iterable[Tensor]) -> None:
    """Write a graph as an ONNX file. Weights over 2 GB go into a second file next to it.

    Args:
        graph: the graph, in fp32 on the CPU.
        path: the .onnx file.
        card: the file's card, as JSON.
        pixels: not used, because nothing is calibrated.
    """
    for name in ("onnx", "onnxscript"):
        library(name, "export")
    args, sides = example(graph)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's own warnings about torch
        program: Any = torch.onnx.export(
            graph.eval(),
            args,
            dynamo=True,
            dynamic_shapes=sides,
            verbose=False,
            input_names=["pixels"],
            output_names=["logits"],
        )
    name_sides(program.model.graph)
    program.model.metadata_props[KEY] = card
    program.save(str(path))


def name_sides(graph: Any) -> None:
    """Name the dimensions that vary: input [batch, C, height, width], output [batch, K].

    The exporter calls them s77 or s53 and gives the output's batch as a formula of all of them.

    Args:
        graph: the exporter's graph, changed in place.
    """
    (pixels,), (logits,) = graph.inputs, graph.outputs
    names = {str(logits.shape[0]): "batch"}  # the formula, which other values have too
    names |= {str(side): name for side, name in zip(pixels.shape, SIDES, strict=True) if not isinstance(side, int)}
    symbol = re.compile("|".join(rf"(?<!\w){re.escape(old)}(?!\w)" for old in names))

    def renamed(side: Any) -> Any:
        if isinstance(side, int) or side.value is None:
            return side
        return symbol.sub(lambda found: names[found[0]], side.value)

    for value in [pixels, *(value for node in graph.all_nodes() for value in node.outputs)]:
        if value.shape is not None:
            value.shape = type(value.shape)([renamed(side) for side in value.shape])


def cannot_run(runtime: str, path: Path, x: Array, error: Exception) -> UnreadableFile:
    """Return the error for a file that a runtime has opened but cannot run.

    Args:
        runtime: its name.
        path: the exported file.
        x: the pixels [B, C, H, W].
        error: what the runtime raised.
    """
    first = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return UnreadableFile(
        f"{runtime} cannot run {path} on images of {x.shape[3]} x {x.shape[2]} pixels ({first}); the file may be "
        f"damaged. Export the weights again."
    )


def open_file(path: Path) -> tuple[str | None, Callable[[Array], Array]]:
    """Return the card of an ONNX file and a function that runs the file.

    Args:
        path: the .onnx file.

    Raises:
        UnreadableFile: ONNX Runtime cannot open it.
    """
    runtime = library("onnxruntime", "export")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # what goes wrong is raised; below 4 it is printed as well
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # spinning threads would starve others
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's errors share no base class
        raise UnreadableFile(
            f"{path} is not an ONNX file that ONNX Runtime can open ({str(error).splitlines()[0][:200]})."
        ) from None

    def run(x: Array) -> Array:
        try:
            return np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0])
        except Exception as error:  # shapes are known only when it runs
            raise cannot_run("ONNX Runtime", path, x, error) from None

    return session.get_modelmeta().custom_metadata_map.get(KEY), run
