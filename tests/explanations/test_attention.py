"""Attention, rollout and attention distance: against sums written out by hand, in float64."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.explanations.models import KINDS, tiny
from vitkit import create
from vitkit.errors import InputError
from vitkit.explanations.attention import (
    attention_distance,
    class_attention,
    distances,
    gradient_rollout,
    rollout,
    with_attention,
)
from vitkit.explanations.common import reader, unwrap


@pytest.mark.parametrize("kind", KINDS)
def test_rows_sum_to_one_and_pruned_heads_are_empty(kind: str) -> None:
    model, x = tiny(kind)
    A = class_attention(model, x)
    c = model.config
    for layer in range(c.num_hidden_layers):
        for head in range(c.num_attention_heads):
            row = A[:, layer, head]
            if head in c.heads_of(layer):
                np.testing.assert_allclose(row.sum(-1), 1, rtol=1e-5)
            else:
                assert np.isnan(row).all()


def test_class_attention_is_the_models_own() -> None:
    model, x = tiny()
    A = class_attention(model, x)
    for layer, theirs in model.attention(x, query=0).items():
        np.testing.assert_array_equal(A[:, layer], theirs[:, :, 0].detach().numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_is_the_product_in_float64(kind: str) -> None:
    model, x = tiny(kind)
    ours = rollout(model, x)
    T = ours.shape[-1]
    for b in range(len(x)):
        R = np.eye(T)
        for A in model.attention(x).values():
            a = A[b].double().detach().numpy().mean(0) + np.eye(T)
            R = a / a.sum(-1, keepdims=True) @ R
        rows, _ = reader(model)
        np.testing.assert_allclose(ours[b], R[rows].mean(0), atol=2e-6)
        assert ours[b].sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_beside_the_attention_are_the_models(kind: str) -> None:
    model, x = tiny(kind)
    logits, seen = with_attention(model, model.embed(x), model.grid_of(x))
    torch.testing.assert_close(logits, model(x), atol=2e-5, rtol=1e-4)
    assert len(seen) == model.config.num_hidden_layers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", [None, 3])
def test_gradient_rollout_against_finite_differences(kind: str, target: int | None) -> None:
    """The gradient of a class's logit in each A is what a small change of that A does to it, in float64."""
    model, x = tiny(kind)
    ours = gradient_rollout(model, x, target)
    model, x = model.double(), x[:1].double()
    with torch.no_grad():
        z0 = model.embed(x)
        logits, seen = with_attention(model, z0, model.grid_of(x))
    label = int(logits.argmax()) if target is None else target
    T = seen[0].shape[-1]
    R = torch.eye(T, dtype=torch.float64)
    for layer, A in enumerate(seen):
        gradient = _gradient(model, z0, layer, A, label)
        R = R + (gradient * A[0]).clamp(min=0).mean(0) @ R
    rows, _ = reader(model)
    expected = (R - torch.eye(T))[rows].mean(0).numpy()
    np.testing.assert_allclose(ours[0], expected, atol=2e-4 * max(expected.max(), 1e-3), rtol=2e-3)
    assert (ours >= 0).all()


def _gradient(model: nn.Module, z0: torch.Tensor, layer: int, A: torch.Tensor, label: int) -> torch.Tensor:
    """d logit / d A of one layer, by running the rest of the model from that A on."""
    A = A.clone().requires_grad_()
    with torch.no_grad():
        z = z0
        for block in model.blocks[:layer]:
            z = block(z, model.config.grid)
    block = model.blocks[layer]
    _, _, v, _ = block.msa.project(block.norm1(z), model.config.grid)
    z = block.residual1(block.msa.out((A @ v).transpose(1, 2).flatten(2))) + z
    z = block.residual2(block.mlp(block.norm2(z))) + z
    for block in model.blocks[layer + 1 :]:
        z = block(z, model.config.grid)
    c = model.config
    if c.pool == "cls":
        y = model.norm(z[:, 0])
    else:
        z = z[:, c.num_prefix_tokens :]
        y = model.norm(z.mean(1)) if c.norm_after_pool else model.norm(z).mean(1)
    if model.pre_logits is not None:
        y = torch.tanh(model.pre_logits(y))
    return torch.autograd.grad(model.head(y)[0, label], A)[0][0]


def test_frozen_weights_and_inference_tensors_have_gradients_too() -> None:
    model, x = tiny()
    free = gradient_rollout(model, x)
    model.requires_grad_(False)
    with torch.inference_mode():
        np.testing.assert_array_equal(gradient_rollout(model, x.clone()), free)
    assert all(p.grad is None for p in model.parameters())


def test_distance_by_hand() -> None:
    """Two by one patches of 8 pixels, and a model that looks everywhere alike: half of the time 8 pixels away."""
    model, _ = tiny(image_size=(16, 8))
    with torch.no_grad():
        for block in model.blocks:
            block.msa.qkv.weight.zero_()
            block.msa.qkv.bias.zero_()
    found = attention_distance(model, torch.randn(3, 3, 16, 8))
    np.testing.assert_allclose(found, np.full((3, 4), 4.0), rtol=1e-5)


def test_distances_are_pixels_between_centres() -> None:
    np.testing.assert_allclose(distances((2, 3), 16)[0], [0, 16, 32, 16, 16 * 2**0.5, 16 * 5**0.5], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_distance_is_the_weighted_mean(kind: str) -> None:
    model, x = tiny(kind)
    found = attention_distance(model, x)
    c = model.config
    rows, columns = (-(-side // c.patch_size) for side in c.image_hw)
    places = np.array([(r, c_) for r in range(rows) for c_ in range(columns)]) * c.patch_size
    far = np.linalg.norm(places[:, None] - places[None], axis=-1)
    for layer, A in model.attention(x).items():
        a = A.detach().double().numpy()[:, :, c.num_prefix_tokens :, c.num_prefix_tokens :]
        a = a / a.sum(-1, keepdims=True)
        expected = (a * far).sum(-1).mean((0, 2))
        np.testing.assert_allclose(found[layer, list(c.heads_of(layer))], expected, rtol=1e-4)
    assert np.isnan(found).sum() == sum(len(gone) for _, gone in c.pruned_heads)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 11), min_size=1, max_size=5))
def test_distance_does_not_depend_on_batches(sizes: list[int]) -> None:
    model, _ = tiny()
    x = torch.randn(sum(sizes), 3, 32, 32, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(attention_distance(model, iter(x.split(sizes))), attention_distance(model, x), rtol=1e-5)


def test_distance_reads_one_batch_at_a_time() -> None:
    """Memory does not grow with the number of images: a batch is let go before the next one is asked for."""
    model, _ = tiny()
    alive = 0

    def batches():
        nonlocal alive
        seen = []
        for _ in range(6):
            gc.collect()
            alive = max(alive, sum(one() is not None for one in seen))
            x = torch.randn(4, 3, 32, 32)
            seen.append(weakref.ref(x))
            yield x

    attention_distance(model, batches())
    assert alive <= 2


def test_no_images_is_a_sentence() -> None:
    with pytest.raises(InputError, match="at least one image"):
        attention_distance(tiny()[0], iter(()))


def test_the_model_leaves_as_it_came() -> None:
    model, x = tiny(hidden_dropout_prob=0.5)
    model.train()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    once, twice = rollout(model, x), rollout(model, x)
    np.testing.assert_array_equal(once, twice)
    assert [module.training for module in model.modules()] == before


def test_beneath_a_compiled_model() -> None:
    model, x = tiny()
    compiled = torch.compile(model, backend="eager")
    assert unwrap(compiled) is model
    np.testing.assert_array_equal(rollout(compiled, x), rollout(model, x))
    np.testing.assert_array_equal(gradient_rollout(compiled, x), gradient_rollout(model, x))
    with pytest.raises(InputError, match=r"Expected a vitkit.ViT.*got Linear.*vitkit.load"):
        rollout(nn.Linear(2, 2), x)


def test_pixels_take_the_models_type() -> None:
    model, x = tiny()
    found = rollout(model, x)
    np.testing.assert_allclose(rollout(model.double(), x), found, atol=1e-6)
    np.testing.assert_allclose(rollout(model.float(), x.double()), found, atol=1e-6)


def test_no_head_and_no_such_class() -> None:
    model, x = tiny(num_classes=0)
    assert rollout(model, x).shape == (2, 17)
    with pytest.raises(InputError, match="no head"):
        gradient_rollout(model, x)
    with pytest.raises(InputError, match="between 0 and 4; got 7"):
        gradient_rollout(tiny()[0], x, 7)


def test_another_image_size() -> None:
    model = create("vit-ti/16", num_hidden_layers=1, num_classes=2).eval()
    assert rollout(model, torch.randn(1, 3, 64, 160)).shape == (1, 1 + 4 * 10)
