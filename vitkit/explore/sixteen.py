"""A graph -> an ONNX file whose weights have 16 bits and whose arithmetic has 32.

Each matrix is stored as whole numbers of 16 bits and one scale per row; the runtime multiplies the two once, when it
loads the file. At the same size this is closer to the model than float16, which spends five of its bits on exponents
that the weights of one row hardly need: `docs/log.md` compares them.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit.optional import library, need
from vitkit.types import Array

MOST = 2**15 - 1


def need_exporters() -> None:
    """Check that what `to_onnx` needs is installed; raises MissingDependency."""
    need("export", "onnx", "onnxscript")


def to_onnx(graph: nn.Module, inputs: dict[str, torch.Tensor], outputs: tuple[str, ...]) -> bytes:
    """Return a graph of fixed shapes as an ONNX file.

    Args:
        graph: the graph, in fp32 on the CPU.
        inputs: an example of each input, by name.
        outputs: names of the outputs.
    """
    need_exporters()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's own warnings about torch
        program: Any = torch.onnx.export(
            graph.eval(),
            tuple(inputs.values()),
            dynamo=True,
            verbose=False,
            input_names=list(inputs),
            output_names=list(outputs),
        )
    return shrunk(program.model_proto)


def shrunk(model: Any) -> bytes:
    """Return an ONNX model as bytes, its matrices in 16 bits.

    Args:
        model: an onnx.ModelProto, changed in place.
    """
    onnx = library("onnx", "export")
    make, from_array = onnx.helper.make_node, onnx.numpy_helper.from_array
    tensors, nodes = [], []
    for tensor in model.graph.initializer:
        name = tensor.name
        if tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2:
            tensors.append(tensor)
            continue
        whole, scale = rounded(onnx.numpy_helper.to_array(tensor))
        tensors += [from_array(whole, f"{name}.whole"), from_array(scale, f"{name}.scale")]
        nodes.append(make("Cast", [f"{name}.whole"], [f"{name}.float"], to=onnx.TensorProto.FLOAT))
        nodes.append(make("Mul", [f"{name}.float", f"{name}.scale"], [name]))
    nodes += model.graph.node
    for node in nodes:
        node.doc_string = ""
        del node.metadata_props[:]  # where in the Python code it came from
    for field, values in (("initializer", tensors), ("node", nodes), ("value_info", [])):  # the runtime infers shapes
        kept = list(values)
        model.graph.ClearField(field)
        getattr(model.graph, field).extend(kept)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def rounded(values: Array) -> tuple[Array, Array]:
    """Round a matrix to whole numbers and one scale per row: values = whole * scale.

    Args:
        values: [..., columns] in float32.

    Returns:
        int16 of the same shape, and float32 [..., 1].
    """
    scale = np.abs(values).max(-1, keepdims=True) / MOST
    scale[scale == 0] = 1
    return np.rint(values / scale).astype(np.int16), scale.astype(np.float32)
