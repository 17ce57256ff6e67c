"""Schedule, parameter groups, freezing, losses, averages: each against the formula written out."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.training.tiny import CONFIG, tiny
from vitkit.data.batch import Batch
from vitkit.data.mix import Mix
from vitkit.data.sources import open_source
from vitkit.errors import ConfigError
from vitkit.model.vit import ViT
from vitkit.runtime import Runtime
from vitkit.training.adamw import OnePassAdamW
from vitkit.training.loss import LOSSES
from vitkit.training.muon import Muon, orthogonal
from vitkit.training.objectives import Classify
from vitkit.training.optim import (
    OPTIMIZERS,
    Average,
    Update,
    clipping,
    freeze,
    groups,
    kernels,
    layer_of,
    matrices,
    moments,
    optimizer_for,
    set_lr,
)
from vitkit.training.recipe import DECAYS
from vitkit.training.whole_step import WholeStep


@pytest.mark.parametrize("decay", DECAYS)
def test_the_decay_is_counted_from_the_end_of_the_warmup(decay: str) -> None:
    r = tiny(lr=0.5, decay=decay, warmup=10, steps=100)
    shape = {"linear": lambda x: 1 - x, "cosine": lambda x: 0.5 + 0.5 * math.cos(math.pi * x), "constant": lambda x: 1}
    for t in (0, 1, 5, 9, 10, 11, 55, 99, 100):
        progress = max(0, (t - 10) / 90)
        assert r.lr_at(t, 100) == pytest.approx(0.5 * shape[decay](progress) * min(1, t / 10))
    assert r.lr_at(10, 100) == 0.5


def test_linear_decay_ends_where_it_is_told() -> None:
    r = tiny(lr=1e-3, decay="linear", final_lr=1e-5, warmup=0, steps=10)
    assert [r.lr_at(t, 10) for t in (0, 5, 10)] == pytest.approx([1e-3, (1e-3 + 1e-5) / 2, 1e-5])


@given(total=st.integers(1, 5000), warmup=st.integers(0, 3000))
@settings(deadline=None, max_examples=50)
def test_a_warmup_longer_than_a_third_is_refused_with_a_number_that_works(total: int, warmup: int) -> None:
    r = tiny(warmup=warmup)
    if warmup <= total / 3:
        assert r.warmup_steps(total) == warmup
        return
    with pytest.raises(ConfigError, match=r"--warmup (\d+)") as error:
        r.warmup_steps(total)
    words = str(error.value).split("--warmup ")[1].split()[0]
    assert tiny(warmup=int(words)).warmup_steps(total) <= total / 3


def test_a_warmup_below_one_is_a_share() -> None:
    assert tiny(warmup=0.25).warmup_steps(80) == 20
    assert tiny(warmup=0.0).warmup_steps(80) == 0


def test_only_kernels_decay() -> None:
    model = ViT(CONFIG)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in groups(model, tiny())}
    assert found[0.1] == kernels(model)
    assert found[0.1] == {name for name in names.values() if name.endswith("weight") and "norm" not in name}
    for name in ("class_token", "positions.table", "blocks.0.norm1.weight", "blocks.0.mlp.fc1.bias", "head.bias"):
        assert name in found[0.0]
    assert sum(map(len, found.values())) == len(names)


def test_weight_decay_is_decoupled_and_relative_to_lr() -> None:
    model = ViT(CONFIG)
    optimizer = optimizer_for(model, tiny(weight_decay=0.3))
    set_lr(optimizer, 0.1)
    before = model.blocks[0].mlp.fc1.weight.detach().clone()
    bias = model.norm.weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model.blocks[0].mlp.fc1.weight, before * (1 - 0.1 * 0.3))
    assert torch.equal(model.norm.weight, bias)


def test_layer_decay() -> None:
    model, names = ViT(CONFIG), {}
    for group in groups(model, tiny(layer_decay=0.5)):
        for p in group["params"]:
            names[id(p)] = group["scale"]
    scales = {name: names[id(p)] for name, p in model.named_parameters()}
    assert scales["patch_embedding.projection.weight"] == scales["class_token"] == 0.5**3
    assert scales["blocks.0.msa.qkv.weight"] == 0.5**2
    assert scales["blocks.1.norm2.bias"] == 0.5
    assert scales["norm.weight"] == scales["head.bias"] == 1
    optimizer = optimizer_for(model, tiny(layer_decay=0.5))
    set_lr(optimizer, 0.8)
    assert {round(g["lr"], 6) for g in optimizer.param_groups} == {0.1, 0.2, 0.4, 0.8}
    assert layer_of("blocks.10.norm1.weight", 12) == 11


def test_freeze_by_name() -> None:
    model = ViT(CONFIG)
    left = freeze(model, ("blocks.0", "patch_embedding.*", "positions.table"))
    frozen = {
        name.split(".")[0] + "." + name.split(".")[1] if "." in name else name
        for name, p in model.named_parameters()
        if not p.requires_grad
    }
    assert frozen == {"blocks.0", "patch_embedding.projection", "positions.table"}
    assert left == sum(p.numel() for p in model.parameters() if p.requires_grad)
    with pytest.raises(ConfigError, match="matches none"):
        freeze(model, ("bloks.*",))
    with pytest.raises(ConfigError, match="freezes every parameter"):
        freeze(model, ("*",))


def batch(weight: float = 1.0) -> Batch:
    labels, others = torch.tensor([1, 0, 3]), torch.tensor([2, 2, 3])
    return Batch(torch.zeros(3, 1, 8, 8), labels, torch.arange(3), others, torch.full((3,), weight))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [1.0, 0.7])
def test_softmax_loss(smoothing: float, weight: float) -> None:
    logits = torch.randn(3, 5)
    b = batch(weight)
    y = weight * F.one_hot(b.labels, 5) + (1 - weight) * F.one_hot(b.others, 5)
    y = y * (1 - smoothing) + smoothing / 5
    expected = -(y * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(LOSSES["softmax"](logits, b, smoothing, weight < 1), expected)
    if weight == 1:
        torch.testing.assert_close(LOSSES["softmax"](logits, b, smoothing, True), expected)


def test_sigmoid_loss() -> None:
    logits, b = torch.randn(3, 5), batch()
    y, p = F.one_hot(b.labels, 5), logits.sigmoid()
    expected = -(y * p.log() + (1 - y) * (1 - p).log()).sum(1)
    torch.testing.assert_close(LOSSES["sigmoid"](logits, b, 0.0, False), expected)
    smooth = y * 0.9 + 0.1 / 5
    expected = -(smooth * p.log() + (1 - smooth) * (1 - p).log()).sum(1)
    torch.testing.assert_close(LOSSES["sigmoid"](logits, b, 0.1, False), expected)


def test_average_follows_and_swaps_back() -> None:
    model = ViT(CONFIG)
    average = Average(model, 0.9)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        average.update()
    for name, p in model.named_parameters():  # w = start + 1, + 2, + 3
        expected = start[name] + 0.1 * (1 * 0.81 + 2 * 0.9 + 3)
        torch.testing.assert_close(average.weights[name], expected, rtol=1e-5, atol=1e-5)
        assert torch.allclose(p, start[name] + 3)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = {name: value.clone() for name, value in average.weights.items()}
    with average.in_place():
        assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    assert all(torch.equal(average.weights[name], kept[name]) for name in kept)


def test_adam_adds_the_decay_to_the_gradient() -> None:
    """Table 3 says Adam; AdamW, which the authors' code computes, decays the weight itself."""
    found = {}
    for name in ("adam", "adamw"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
        layer = model[0]
        torch.nn.init.constant_(layer.weight, 2.0)
        optimizer = optimizer_for(model, tiny(optimizer=name, weight_decay=0.5, lr=0.1))
        layer.weight.grad = torch.zeros(1, 2)
        optimizer.step()
        found[name] = layer.weight[0, 0].item()
    assert found["adamw"] == pytest.approx(2.0 * (1 - 0.1 * 0.5))  # decoupled
    assert found["adam"] == pytest.approx(2.0 - 0.1, abs=1e-4)  # the decay is all of the gradient, normalised by Adam


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_muon_updates_as_torchs_does() -> None:
    """Three steps on one matrix, tall or wide: equal but for torch's bf16, which is off by about 1%."""
    for shape in ((24, 8), (8, 24), (16, 16)):
        torch.manual_seed(0)
        ours, theirs = (torch.nn.Parameter(torch.full(shape, 0.5)) for _ in range(2))
        one = Muon([{"params": [ours], "weight_decay": 0.1, "pieces": 1}], 0.95, lr=0.02)
        other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        for _ in range(3):
            ours.grad = torch.randn(shape)
            theirs.grad = ours.grad.clone()
            one.step()
            other.step()
        assert (ours - theirs).norm() < 0.02 * (theirs - 0.5).norm()


def test_orthogonal_matrices_are_nearly_orthogonal() -> None:
    for shape in ((5, 12, 30), (5, 30, 12), (1, 8, 8)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
        assert values.min() > 0.3
        assert values.max() < 1.3
    assert torch.equal(orthogonal(torch.zeros(2, 4, 4)), torch.zeros(2, 4, 4))


def test_muon_trains_the_blocks_and_adamw_the_rest() -> None:
    model = ViT(CONFIG)
    optimizer = optimizer_for(model, tiny(optimizer="muon", weight_decay=0.3, layer_decay=0.5))
    set_lr(optimizer, 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stacked = matrices(model)
    assert {name: stacked[f"blocks.1.{name}.weight"] for name in ("msa.qkv", "msa.out", "mlp.fc1", "mlp.fc2")} == {
        "msa.qkv": 3,
        "msa.out": 1,
        "mlp.fc1": 1,
        "mlp.fc2": 1,
    }
    assert len(stacked) == 8
    for name, parameter in model.named_parameters():
        kept = set(optimizer.state[parameter])
        assert kept == ({"momentum"} if name in stacked else {"step", "exp_avg", "exp_avg_sq"}), name
    assert {round(group["lr"], 6) for group in optimizer.param_groups} == {0.0125, 0.025, 0.05, 0.1}
    assert moments(model, tiny(optimizer="muon")) == sum(
        value.numel() for state in optimizer.state.values() for key, value in state.items() if key != "step"
    )
    assert moments(model, tiny()) == 2 * moments(model, tiny(optimizer="sgd", weight_decay=0.0))


def test_muon_treats_q_k_and_v_as_three_matrices() -> None:
    model = ViT(CONFIG)
    qkv, apart = model.blocks[0].msa.qkv.weight, [torch.nn.Parameter(torch.zeros(32, 32)) for _ in range(3)]
    torch.nn.init.zeros_(qkv)
    qkv.grad = torch.randn(qkv.shape, generator=torch.Generator().manual_seed(0))
    for part, grad in zip(apart, qkv.grad.chunk(3), strict=True):
        part.grad = grad.clone()
    optimizer_for(model, tiny(optimizer="muon", lr=0.1, weight_decay=0.0)).step()
    for part in apart:
        Muon([{"params": [part], "weight_decay": 0.0, "pieces": 1}], 0.9, lr=0.1).step()
    assert torch.allclose(qkv, torch.cat(apart), atol=1e-6)


def test_muon_leaves_the_weights_alone_if_a_gradient_is_not_finite() -> None:
    model = ViT(CONFIG)
    optimizer = optimizer_for(model, tiny(optimizer="muon", weight_decay=0.3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for broken in (1.0, 0.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan if broken else 1.0)
        optimizer.found_inf = torch.tensor(broken)
        optimizer.step()
        same = [torch.equal(p, before[name]) for name, p in model.named_parameters()]
        assert all(same) if broken else not any(same)
        optimizer.state.clear()


def test_muon_without_a_matrix_is_refused() -> None:
    model = ViT(CONFIG)
    freeze(model, ("blocks",))
    with pytest.raises(ConfigError, match="optimizer='muon' trains the matrices of a ViT's blocks; none is trained"):
        optimizer_for(model, tiny(optimizer="muon"))


class Replayed:
    """Stands for a CUDA graph on the CPU: `replay` works again, into the memory of the first result."""

    made = 0

    def __init__(self, work: Callable[[], Any], result: Any) -> None:
        self.work, self.result = work, result

    def replay(self) -> None:
        found = self.work()
        if found is not None:
            self.result.copy_(found)


def captured_for(
    optimizer: torch.optim.Optimizer, average: Average | None = None
) -> Callable[[Callable[[], Any]], tuple[Replayed, Any]]:
    def capture(work: Callable[[], Any]) -> tuple[Replayed, Any]:
        Replayed.made += 1
        tensors = [t for p, state in optimizer.state.items() for t in (p.data, *state.values())]
        tensors += average.weights.values() if average is not None else []
        before = [t.clone() for t in tensors]  # capturing has no effect
        random = torch.get_rng_state()
        result = work()
        torch.set_rng_state(random)
        for t, old in zip(tensors, before, strict=True):
            t.copy_(old)
        return Replayed(work, result), result

    return capture


def update_of(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], average: Average | None = None
) -> Update:
    def clip() -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    return Update(optimizer, parameters, average, clip, torch.amp.GradScaler("cpu", enabled=False))


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "muon"])
@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_broken_numbers_change_no_weights(name: str, broken: str) -> None:
    model = ViT(CONFIG)
    parameters = list(model.parameters())
    optimizer = optimizer_for(model, tiny(optimizer=name, weight_decay=0.0))
    update = update_of(optimizer, parameters)
    assert update.guarded
    found = []
    for bad in (False, True, False):
        for p in parameters:
            p.grad = torch.ones_like(p)
        if bad and broken == "gradient":
            parameters[3].grad.view(-1)[0] = float("inf")
        total = update.measure(torch.tensor([float("nan") if bad and broken == "loss" else 1.0, 2.0]))
        assert total.isfinite().all() == (not bad)
        update.apply()
        found.append(torch.cat([p.detach().flatten() for p in parameters]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    if name.startswith("adam"):
        assert optimizer.state[parameters[0]]["step"] == 2


def one_pass(model: ViT) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"](model, tiny(), fused=True, capturable=True)


def test_a_captured_adamw_clips_as_it_reads() -> None:
    """Two steps with and without: the same norms and weights; `clipping` alone changes no gradient."""
    found = []
    for kind in (torch.optim.AdamW, OnePassAdamW):
        torch.manual_seed(0)
        model = ViT(CONFIG)
        optimizer = one_pass(model)
        assert type(optimizer) is OnePassAdamW
        if kind is torch.optim.AdamW:
            optimizer = optimizer_for(model, tiny())
        parameters, norms = list(model.parameters()), []
        for group in optimizer.param_groups:
            group["capturable"] = False  # torch refuses it on a CPU
        for size in (1.0, 100.0):  # AdamW would not notice a constant factor
            for p in parameters:
                p.grad = size * torch.randn_like(p)
            before = parameters[0].grad.clone()
            norms.append(clipping(optimizer, parameters, 0.5, Runtime("cpu"))())
            assert torch.equal(parameters[0].grad, before) == (kind is OnePassAdamW)
            optimizer.step()
        found.append([*norms, *(p.detach() for p in parameters)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_loss_scaling_and_odd_addresses_are_left_to_torch() -> None:
    model = ViT(CONFIG)
    parameters, runtime = list(model.parameters()), Runtime("cpu")
    runtime.scaler = torch.amp.GradScaler("cpu", enabled=True)
    assert clipping(one_pass(model), parameters, 1.0, runtime).func == runtime.clip
    model.head.bias.data = torch.zeros(len(model.head.bias) + 1)[1:]
    assert type(one_pass(model)) is torch.optim.AdamW


class Capturable(torch.nn.Module):
    """Stands for the fused training forward of a GPU."""

    def __init__(self, model: ViT, ready: bool = True) -> None:
        super().__init__()
        self.model, self.graph, self.ready = model, True, ready

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def capturable(self, x: torch.Tensor) -> bool:
        return self.ready


def batches(count: int) -> list[Batch]:
    rng = torch.Generator().manual_seed(0)
    x, labels = torch.randn(count, 4, 1, 8, 8, generator=rng), torch.randint(0, 10, (count, 4), generator=rng)
    shares = torch.rand(count, 4, generator=rng)
    return [Batch(x[i], labels[i], labels[i], labels[i].flip(0), shares[i]) for i in range(count)]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_captured_step_equals_a_plain_one(name: str) -> None:
    recipe = tiny(optimizer=name, mix=Mix(cutmix=1.0), drop_path=0.5, label_smoothing=0.1, batch_size=4)
    found, runtime = [], Runtime("cpu")
    for captured in (False, True):
        torch.manual_seed(0)
        model = ViT(dataclasses.replace(CONFIG, drop_path_rate=0.5))
        torch.nn.init.normal_(model.head.weight)
        parameters = list(model.parameters())
        forward, objective = Capturable(model.train()), Classify(recipe, 0, open_source("digits", "train"))
        optimizer = optimizer_for(model, recipe)
        for group in optimizer.param_groups:
            group["lr"], optimizer.defaults["capturable"] = torch.tensor(1e-2), True
        update = update_of(optimizer, parameters, average=Average(model, 0.9))
        assert WholeStep.possible(forward, objective, update)
        whole = WholeStep(forward, objective, update, 4.0, runtime, captured_for(optimizer, update.average))
        assert not forward.graph
        Replayed.made, totals, made = 0, [], []
        for step, batch in enumerate(batches(5)):
            for group in optimizer.param_groups:
                group["lr"].fill_(0.1 / (step + 1))
            torch.manual_seed(step)
            if whole.takes(batch) and captured:
                totals.append(whole(batch).clone())
            else:
                optimizer.zero_grad(set_to_none=True)
                loss, correct = objective.loss(forward, batch, step, runtime)
                (loss / 4.0).backward()
                totals.append(update.measure(torch.stack([loss.detach(), correct, torch.zeros(())])))
                update.apply()
            made.append(Replayed.made)
        assert made == ([0, 0, 1, 1, 1] if captured else [0] * 5)
        found.append([*totals, *(p.detach().clone() for p in parameters), *update.average.weights.values()])
    assert all(map(torch.equal, *found))


def test_a_step_that_cannot_be_captured_is_left_to_the_loop() -> None:
    model, recipe = ViT(CONFIG), tiny()
    optimizer, objective = optimizer_for(model, recipe), Classify(recipe, 0, open_source("digits", "train"))
    update = update_of(optimizer, list(model.parameters()))
    assert not WholeStep.possible(Capturable(model), objective, update)  # its learning rates are not on the device
    update.capturable = True
    assert not WholeStep.possible(model, objective, update)
    assert not WholeStep.possible(
        Capturable(model), Classify(tiny(class_weights="balanced"), 0, open_source("digits", "train")), update
    )
    whole = WholeStep(Capturable(model, ready=False), objective, update, 4.0, Runtime("cpu"), captured_for(optimizer))
    assert not any(whole.takes(batch) for batch in batches(4))


def test_a_run_does_not_import_the_compiler(tmp_path: Path) -> None:
    """It takes as long as everything else together until the first step."""
    code = f"""
import sys
from pathlib import Path
from tests.training.tiny import run, tiny
for optimizer in ("adamw", "muon"):
    out, recipe = Path({str(tmp_path)!r}) / optimizer, tiny(steps=1, warmup=0, optimizer=optimizer)
    run(out, recipe)
    run(out, recipe, resume=True)
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
