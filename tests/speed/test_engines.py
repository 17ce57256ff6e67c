from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.server.conftest import tiny
from vitkit.errors import UnknownName, pick
from vitkit.jobs.evaluate import ByEngine
from vitkit.server.service import Service
from vitkit.speed import ENGINES, chosen
from vitkit.speed.exported import EXPORTS
from vitkit.speed.frozen import FEW

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own imports


@pytest.mark.parametrize("name", ["torch", pytest.param("compile", marks=pytest.mark.slow)])
def test_an_engine_keeps_the_models_answers(name: str) -> None:
    model, engine = tiny(), ENGINES[name]
    forward = engine.build(model)
    with torch.inference_mode():
        for size in (1, 2, 5, 3):
            x = torch.randn(size, 3, 32, 32)
            expected = model(x)
            assert (forward(x) - expected).abs().max() <= engine.tolerance * expected.abs().max()


@pytest.mark.slow
def test_compile_builds_no_graph_for_another_batch_size() -> None:
    forward = ENGINES["compile"].build(tiny())
    with torch.inference_mode():
        for size in (1, 2):
            forward(torch.randn(size, 3, 32, 32))
        with torch.compiler.set_stance("fail_on_recompile"):
            for size in (3, 8, 16):
                forward(torch.randn(size, 3, 32, 32))


@pytest.mark.filterwarnings("ignore:.*needs a CUDA device")
def test_an_engine_that_falls_back_has_the_name_of_what_runs() -> None:
    model = tiny()
    assert [chosen(name, model) for name in (None, "torch", "cuda-fused", "fp8")] == [
        "cpu-fused",
        "torch",
        "cpu-fused",
        "cpu-fused",
    ]
    assert chosen(None, tiny().bfloat16()) == "torch"
    assert Service(model, engine="fp8").engine == ByEngine(model, "cuda-fused").name == "cpu-fused"
    with pytest.raises(UnknownName):
        chosen("warp", model)


def test_an_unknown_engine_is_refused_with_the_list() -> None:
    with pytest.raises(UnknownName, match="torch, compile"):
        pick(ENGINES, "wrap", "engine")


def promise(tolerance: float | None) -> str:
    """Return the words for a row's tolerance."""
    if tolerance is None:
        return "none: measure it on your images"
    return f"logits within {tolerance:g} of the largest" if tolerance else "the model itself"


def test_the_documentation_lists_every_engine_with_its_promise() -> None:
    page = (Path(__file__).parents[2] / "docs" / "speed.md").read_text(encoding="utf-8")
    section = page.split("## Engines\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "| `" in line]
    assert {name.strip("`"): words for name, _, words in rows} == {
        name: promise(engine.tolerance) for name, engine in ENGINES.items()
    }
    assert f"more\nthan {FEW:,} images" in section


@pytest.mark.parametrize("name", ["onnx", "openvino", "openvino-int8"])
def test_an_engine_promises_what_the_export_does(name: str) -> None:
    assert ENGINES[name].tolerance == EXPORTS[name].tolerance
