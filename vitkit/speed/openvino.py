"""OpenVINO files in fp32 and int8: the fastest option on Intel and AMD CPUs.

int8 is post-training quantization by NNCF: weights and the inputs of matrix products are rounded to 8 bits, with ranges
measured on the user's images. NNCF is told that the model is a transformer, so that it treats LayerNorm outputs and
attention separately; without that the result is useless.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.cpu_features import check_instructions
from vitkit.errors import DataError, UnreadableFile
from vitkit.optional import library
from vitkit.speed.graph import Graph
from vitkit.speed.onnx import KEY, cannot_run, example
from vitkit.types import Array

KEPT = 4  # image sizes to keep compiled
SMOOTH = 0.8  # share of large activations to move into the weights (SmoothQuant); 0.5 and 0.95 were worse


def converted(graph: Graph) -> Any:
    """Convert a graph to OpenVINO's model.

    Args:
        graph: the graph, in fp32 on the CPU.
    """
    openvino = library("openvino", "export")
    args, sides = example(graph)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's own warnings about torch
        program = torch.export.export(graph.eval(), args, dynamic_shapes=sides)
        model = openvino.convert_model(program)
    free = [-1, -1] if graph.any_size else list(args[0].shape[2:])
    model.reshape([-1, graph.config.num_channels, *free])
    return model


def write(graph: Graph, path: Path, card: str, pixels: Iterable[Tensor]) -> None:
    """Write a graph in fp32.

    Args:
        graph: the graph, in fp32 on the CPU.
        path: the .xml file; weights go into the .bin file next to it.
        card: the file's card, as JSON.
        pixels: not used, because nothing is calibrated.
    """
    save(converted(graph), path, card)


def write_int8(graph: Graph, path: Path, card: str, pixels: Iterable[Tensor]) -> None:
    """Write a graph in int8.

    Args:
        graph: the graph, in fp32 on the CPU.
        path: the .xml file; weights go into the .bin file next to it.
        card: the file's card, as JSON.
        pixels: batches of the user's images; all of them are used.

    Raises:
        DataError: there are no images.
    """
    images = [one[None].numpy() for batch in pixels for one in batch.float().cpu()]
    if not images:
        raise DataError("int8 is calibrated on your images; got none. Give some with --images DATA.")
    check_instructions()
    nncf = library("nncf", "export")
    nncf.set_log_level(logging.ERROR)
    model = converted(graph)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # NNCF prints progress bars
        warnings.simplefilter("ignore")
        model = nncf.quantize(
            model,
            nncf.Dataset(images),
            subset_size=len(images),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            ignored_scope=nncf.IgnoredScope(names=precise(model)),
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=SMOOTH)
            ),
        )
    save(model, path, card)


def precise(model: Any) -> list[str]:
    """Return the names of the products that stay in fp32, because 8 bits cost more accuracy there than they save time.

    These are E, which reads the pixels; attention and token similarity, whose operands both vary with the image; and
    the products of a single token (the class token in the last block, the head), which take almost no time.

    Args:
        model: OpenVINO's model, before quantization.
    """
    names, first = [], True
    for op in model.get_ordered_ops():
        if op.get_type_name() == "ScaledDotProductAttention":
            names.append(op.get_friendly_name())
        elif op.get_type_name() == "MatMul":
            shape = op.input_value(0).get_partial_shape()
            varies = op.input_value(1).get_node().get_type_name() != "Constant"
            single = len(shape) == 2 or (len(shape) == 3 and shape[1].is_static and shape[1].get_length() == 1)
            if first or varies or single:
                names.append(op.get_friendly_name())
            first = False
    return names


def save(model: Any, path: Path, card: str) -> None:
    """Write OpenVINO's model and its card."""
    model.set_rt_info(card, [KEY])
    library("openvino", "export").save_model(model, str(path), compress_to_fp16=False)


def open_file(path: Path) -> tuple[str | None, Callable[[Array], Array]]:
    """Return the card of an OpenVINO file and a function that runs it. Each image size is compiled on first use.

    Args:
        path: the .xml file.

    Raises:
        UnreadableFile: OpenVINO cannot open it.
    """
    check_instructions()
    core = library("openvino", "export").Core()
    # Not `core.read_model`: what it cannot read it offers to the readers of other formats, and TensorFlow's prints.
    reader = library("openvino.frontend", "export").FrontEndManager().load_by_framework("ir")
    try:
        if not reader.supported(str(path)):
            raise RuntimeError("it does not begin as one")
        model = reader.convert(reader.load(str(path)))
    except RuntimeError as error:
        raise UnreadableFile(
            f"{path} is not an OpenVINO file with its .bin file next to it ({str(error).splitlines()[0][:200]})."
        ) from None
    how = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    ready: dict[tuple[int, ...], Any] = {}

    def run(x: Array) -> Array:
        if x.shape[1:] not in ready:
            if len(ready) == KEPT:
                ready.pop(next(iter(ready)))
            try:
                fixed = model.clone()
                fixed.reshape([-1, *x.shape[1:]])
                ready[x.shape[1:]] = core.compile_model(fixed, "CPU", how)
            except (RuntimeError, ValueError) as error:  # values in the .bin file decide what can be compiled
                raise cannot_run("OpenVINO", path, x, error) from None
        return np.array(ready[x.shape[1:]](x)[0])

    card = model.get_rt_info([KEY]).astype(str) if model.has_rt_info([KEY]) else None
    return card, run
