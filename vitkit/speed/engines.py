"""The ways to run a finished model: ENGINES. Each takes a model and returns a function from pixels to logits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitkit.errors import pick
from vitkit.model.backbone import Backbone
from vitkit.model.create import need_vit
from vitkit.model.parts.fit import unfit
from vitkit.model.vit import ViT

Forward = Callable[[Tensor], Tensor]  # pixels [B, C, H, W], on the model's device -> logits [B, K]


@dataclass(frozen=True)
class Engine:
    """One way to run a model.

    Args:
        build: returns the function that runs it, for any batch size and the model's own image size.
        tolerance: largest difference of a logit from the plain model's, relative to the largest logit; None if it is
            not promised but measured on the user's images.
        words: description for lists and help texts.
        cuda: whether it needs a CUDA device; without one cpu-fused runs instead.
    """

    build: Callable[[Backbone], Forward]
    tolerance: float | None
    words: str
    cuda: bool = False


def plain(model: Backbone) -> Forward:
    """Return the model itself."""
    return model


def compiled(model: Backbone) -> Forward:
    """Run torch.compile with a variable batch size: it compiles once for one image and once for several."""
    forward = torch.compile(model)

    def run(x: Tensor) -> Tensor:
        if len(x) > 1:
            torch._dynamo.mark_dynamic(x, 0)
        return forward(x)

    return run


def fused(model: Backbone) -> Forward:
    """Build the fused engine (fused.py), which shares the model's weights where their types match."""
    from vitkit.speed.fused import Fused

    return Fused(need_vit(model, "The engine cpu-fused"), share=True)


def on_cuda(build: Callable[[Backbone], Forward], name: str) -> Callable[[Backbone], Forward]:
    """Wrap a builder that needs a CUDA device: without one, the fused engine in full precision runs instead."""
    return lambda model: (build if chosen(name, model) == name else fused)(model)


def fused_fp8(model: Backbone) -> Forward:
    """Build the fused engine with 8-bit matrix products (fp8.py)."""
    from vitkit.speed.fp8 import Fp8

    return Fp8(need_vit(model, "The engine fp8"))


def exported(to: str) -> Callable[[Backbone], Forward]:
    """Return the builder of an engine that runs in another runtime, on the CPU.

    Args:
        to: a row of `exported.EXPORTS`.
    """

    def build(model: Backbone) -> Forward:
        from vitkit.speed.exported import through

        return through(to, model)

    return build


ENGINES: dict[str, Engine] = {
    "torch": Engine(plain, 0.0, "plain PyTorch; starts immediately"),
    "compile": Engine(compiled, 5e-6, "torch.compile; spends about a minute compiling, then runs faster"),
    "cpu-fused": Engine(fused, 5e-6, "fewer passes over memory, and the last block for the class token alone; fp32"),
    "cuda-fused": Engine(
        on_cuda(fused, "cuda-fused"), 0.03, "cpu-fused in bf16, with fused kernels and CUDA graphs", cuda=True
    ),
    "fp8": Engine(on_cuda(fused_fp8, "fp8"), 0.15, "cuda-fused with 8-bit matrix products", cuda=True),
    "onnx": Engine(exported("onnx"), 1e-5, "ONNX Runtime, fp32 on the CPU"),
    "openvino": Engine(exported("openvino"), 1e-5, "OpenVINO, fp32 on the CPU"),
    "openvino-int8": Engine(
        exported("openvino-int8"),
        None,
        "OpenVINO, int8 on the CPU; export it with your images first, then serve the file",
    ),
}


def usual(model: Backbone) -> str:
    """Return the default engine for a model: the fastest that starts quickly and keeps the answers.

    Args:
        model: on its device, in its precision.
    """
    weight = next(model.parameters())
    from vitkit.speed.fused import TAKES

    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    fits = on_cpu and isinstance(model, ViT) and not unfit(model.config, TAKES)
    return "cpu-fused" if fits else "torch"


def chosen(name: str | None, model: Backbone) -> str:
    """Return the engine that will run: the requested one or the default. Warns when another one has to replace it.

    Args:
        name: a row of ENGINES; None for the default.
        model: on its device, in its precision.
    """
    name = name or usual(model)
    if "fused" in name or name == "fp8":
        need_vit(model, f"The engine {name}")
    if pick(ENGINES, name, "engine").cuda and not next(model.parameters()).is_cuda:
        warnings.warn(f"{name} needs a CUDA device; the engine cpu-fused runs instead.", stacklevel=3)
        return "cpu-fused"
    return name
