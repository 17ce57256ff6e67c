from __future__ import annotations

import pytest
import torch

from tests.server.conftest import tiny
from vitkit.errors import UnknownName, pick
from vitkit.jobs.evaluate import ByEngine
from vitkit.server.service import Service
from vitkit.speed import ENGINES, chosen

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
