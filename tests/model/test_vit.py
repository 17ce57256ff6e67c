"""The model on its own: shapes, masks, pruning, chunking, checkpointing, dropout places, initialisation, bad input.

That its numbers are those of the paper's equations and of the other libraries is tests/test_parity.py's matter.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vitkit
from vitkit import ViT, ViTConfig
from vitkit.errors import ConfigError, InputError, VitkitError
from vitkit.model.parts.layers import drop_path

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
}


def tiny(**changes) -> ViT:
    """A small model in eval mode whose every parameter is random, so that nothing is equal because it is zero."""
    model = ViT(ViTConfig(**TINY | changes)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def pixels(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, 32, 32)))


def test_vit_py_is_short() -> None:
    import vitkit.model.vit as module

    assert len(Path(module.__file__).read_text().splitlines()) <= 320


def test_shapes_of_every_door() -> None:
    model, x = tiny(num_register_tokens=3, pre_logits=True), pixels()
    assert model(x).shape == (2, 5)
    assert model.features(x).shape == (2, 32)
    assert model.tokens(x).shape == (2, 1 + 3 + 16, 32)
    states = model.hidden_states(x)
    assert len(states) == 3
    assert torch.equal(model.norm(states[-1]), model.tokens(x))
    assert torch.allclose(model.tokens(x)[:, 0], model.features(x), atol=1e-6)
    assert torch.equal(model(x), model.head(model.pre_logits(model.features(x)).tanh()))
    A = model.attention(x)
    assert sorted(A) == [0, 1]
    assert A[0].shape == (2, 4, 20, 20)


def test_no_head() -> None:
    model, x = tiny(num_classes=0), pixels()
    assert torch.equal(model(x), model.features(x))


def test_attention_of_what_is_asked() -> None:
    model, x = tiny(), pixels()
    A = model.attention(x)
    for layer in A.values():
        assert torch.allclose(layer.sum(-1), torch.ones(2, 4, 17), atol=1e-6)
    part = model.attention(x, layers=[-1, 0], heads=[3, 1], query=0)
    assert list(part) == [1, 0]
    for layer in (0, 1):
        assert torch.allclose(part[layer], A[layer][:, [3, 1], :1], atol=1e-7)
    assert model.attention(x, layers=[]) == {}


def test_attention_stops_at_the_last_layer_asked(monkeypatch) -> None:
    model = tiny()
    monkeypatch.setattr(model.blocks[1], "forward", lambda *a: pytest.fail("layer 1 was not asked for"))
    model.attention(pixels(), layers=[1])


def test_attention_is_that_of_the_fused_kernel() -> None:
    model, x = tiny(), pixels()
    z = model.embed(x)
    msa = model.blocks[0].msa
    _, _, v, _ = msa.project(model.blocks[0].norm1(z), (4, 4))
    sa = model.attention(x, layers=0)[0] @ v
    written_out = msa.out(sa.transpose(1, 2).flatten(2))
    assert torch.allclose(msa(model.blocks[0].norm1(z), (4, 4)), written_out, atol=1e-5)


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_head_mask_silences_heads(shape) -> None:
    model, x = tiny(), pixels()
    mask = torch.ones(shape)
    assert torch.allclose(model(x, mask), model(x), atol=1e-6)
    mask[..., 1] = 0
    masked = model(x, mask)
    assert not torch.allclose(masked, model(x), atol=1e-3)
    with torch.no_grad():
        for block in model.blocks:
            block.msa.out.weight[:, 8:16] = 0
    assert torch.allclose(masked, model(x), atol=1e-5)


def test_pruning_equals_masking_and_shrinks() -> None:
    model, x = tiny(), pixels()
    mask = torch.ones(2, 4)
    mask[0, 1] = mask[1, 0] = mask[1, 3] = 0
    expected, before = model(x, mask), sum(p.numel() for p in model.parameters())
    model.prune_heads({0: [1]})
    model.prune_heads({1: [3, 0], 0: [1]})  # in steps, and a head named twice
    assert torch.allclose(model(x), expected, atol=1e-5)
    assert model.config.pruned_heads == ((0, (1,)), (1, (0, 3)))
    assert before - sum(p.numel() for p in model.parameters()) == 3 * (4 * 8 * 32 + 3 * 8)
    assert [a.shape[1] for a in model.attention(x).values()] == [3, 2]
    again = ViT(model.config).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))
    assert torch.allclose(model(x, mask), expected, atol=1e-5)  # masks keep their original numbers
    with pytest.raises(InputError, match=r"Heads \[1\] are pruned.*choose from \[0, 2, 3\]"):
        model.attention(x, layers=0, heads=1)


def test_refused_pruning_changes_nothing() -> None:
    model, x = tiny(), pixels()
    before = model(x)
    with pytest.raises(ConfigError, match="no head in layer 1"):
        model.prune_heads({0: [0], 1: range(4)})
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("chunk", [1, 4, 17, 100])
def test_chunked_feed_forward(chunk) -> None:
    model, x = tiny(), pixels()
    chunked = tiny(chunk_size_feed_forward=chunk)
    chunked.load_state_dict(model.state_dict())
    assert torch.allclose(chunked(x), model(x), atol=1e-5)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model, x = tiny().train(), pixels()
    gradients = []
    for flag in (False, True):
        model.gradient_checkpointing = flag
        model.zero_grad()
        model(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*gradients, strict=True))
    assert max(g.abs().max() for g in gradients[0]) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": "mean"},
        {"pool": "mean", "norm_after_pool": True},
        {"pool": "mean", "class_token": False},
        {"num_register_tokens": 2, "pool": "mean"},
    ],
)
def test_mean_pooling(changes) -> None:
    model, x = tiny(**changes), pixels()
    z = model.hidden_states(x)[-1][:, -16:]
    y = model.norm(z.mean(1)) if "norm_after_pool" in changes else model.norm(z).mean(1)
    assert torch.allclose(model.features(x), y, atol=1e-6)


def test_layer_scale_and_stochastic_depth() -> None:
    model, x = tiny(layer_scale=0.5, drop_path_rate=0.5), pixels()
    names = [n for n, _ in model.named_parameters() if "gamma" in n]
    assert names == [f"blocks.{i}.residual{k}.gamma" for i in range(2) for k in (1, 2)]
    assert torch.equal(model(x), model(x))
    model.train()
    assert model.blocks[0].residual1.rate == 0
    assert model.blocks[1].residual1.rate == 0.5
    kept = model.blocks[1].residual1(torch.ones(10_000, 1, 32)) / model.blocks[1].residual1.gamma
    assert {round(v, 3) for v in kept[:, 0, 0].tolist()} == {0.0, 2.0}
    assert abs(kept.mean().item() - 1) < 0.05


@pytest.mark.parametrize(("images", "rate"), [(1, 0.3), (3, 0.5), (10, 0.1), (8, 0.55), (4, 1.0)])
def test_stochastic_depth_drops_every_image_equally_often_and_nearly_equally_many(images, rate) -> None:
    torch.manual_seed(0)
    factors = torch.stack([drop_path(images, rate, torch.device("cpu")) for _ in range(4000)])
    dropped = factors == 0
    assert {int(n) for n in dropped.sum(1).unique()} <= {math.floor(images * rate), math.ceil(images * rate)}
    assert ((dropped.float().mean(0) - rate).abs() < 5 * (rate * (1 - rate) / 4000) ** 0.5 + 1e-6).all()
    assert torch.allclose(factors[~dropped], torch.tensor(1 / max(1 - rate, 1e-6)))


def test_dropout_stands_where_the_paper_puts_it() -> None:
    """After positions, after U_msa, after both dense layers of the MLP; not after U_qkv."""
    model = tiny(hidden_dropout_prob=1.0).train()
    x = pixels()
    assert torch.equal(model.embed(x), torch.zeros_like(model.embed(x)))
    z = torch.randn(2, 17, 32)
    block = model.blocks[0]
    assert torch.equal(block.msa(z, (4, 4)), torch.zeros_like(z))
    assert torch.equal(block.mlp(z), torch.zeros_like(z))
    assert all(part.abs().max() > 0 for part in block.msa.project(z, (4, 4))[:3])
    inside = tiny().train()
    inside.blocks[0].mlp.dropout.p = 0.5
    hidden: list[Tensor] = []
    inside.blocks[0].mlp.fc2.register_forward_pre_hook(lambda m, args: hidden.append(args[0]))
    inside.blocks[0].mlp(z)
    assert 0.4 < (hidden[0] == 0).float().mean() < 0.6
    model.eval()
    assert torch.equal(model(x), model(x))
    assert model.embed(x).abs().max() > 0


def test_attention_dropout_only_in_training() -> None:
    model, x = tiny(attention_probs_dropout_prob=0.5), pixels()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_the_authors_initialisation() -> None:
    model = ViT(
        ViTConfig(hidden_size=256, num_hidden_layers=1, num_attention_heads=4, intermediate_size=1024, pre_logits=True)
    )
    p = dict(model.named_parameters())
    for name in (
        "head.weight",
        "head.bias",
        "class_token",
        "blocks.0.msa.qkv.bias",
        "blocks.0.msa.out.bias",
        "patch_embedding.projection.bias",
        "pre_logits.bias",
    ):
        assert p[name].abs().max() == 0, name
    for kernel, fan in (("msa.out", 512), ("mlp.fc1", 1280), ("mlp.fc2", 1280)):
        weight, bound = p[f"blocks.0.{kernel}.weight"], math.sqrt(6 / fan)
        assert 0.99 * bound < weight.abs().max() <= bound
        assert abs(weight.std() / (bound / math.sqrt(3)) - 1) < 0.02
    for kernel in p["blocks.0.msa.qkv.weight"].chunk(3):  # each has its own fan
        assert 0.99 * math.sqrt(6 / 512) < kernel.abs().max() <= math.sqrt(6 / 512)
    for name in ("fc1", "fc2"):
        assert 0 < p[f"blocks.0.mlp.{name}.bias"].std() < 2e-6
    patch = p["patch_embedding.projection.weight"]
    assert abs(patch.std() * math.sqrt(768) - 1) < 0.02
    assert abs(p["positions.table"].std() / 0.02 - 1) < 0.02
    assert abs(p["blocks.0.norm1.weight"].mean() - 1) == 0


def test_meta_device() -> None:
    with torch.device("meta"):
        model = vitkit.create("vit-G/14")
        assert model(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
    assert all(p.is_meta for p in model.parameters())


def test_compiles_without_a_graph_break() -> None:
    model, x = tiny(num_register_tokens=1, pre_logits=True), pixels()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
        assert torch.allclose(compiled(x, torch.rand(2, 4)), compiled(x, torch.ones(2, 4))) is False
        other = pixels(1, 3, 48, 32)
        assert torch.allclose(compiled(other), model(other), atol=1e-5)


def test_padding_on_request() -> None:
    model, x = tiny(pad_input=True, image_size=30), pixels(1, 3, 30, 27)
    padded = torch.zeros(1, 3, 32, 32)
    padded[:, :, :30, :27] = x
    assert torch.equal(model(x), model(padded))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m(pixels(1, 1, 32, 32)), ["[batch, 3, height, width]", "[1, 1, 32, 32]", "num_channels="]),
        (lambda m: m(pixels(3, 32, 32)), ["[batch, 3, height, width]", "[3, 32, 32]", "x[None]"]),
        (lambda m: m(torch.zeros(1, 3, 0, 32)), ["[1, 3, 0, 32]", "at least one pixel"]),
        (lambda m: m(pixels(1, 3, 33, 32)), ["patch size 8", "33 x 32", "Resize to 32 x 32", "pad_input=True"]),
        (lambda m: m(pixels(1, 3, 4, 32)), ["4 x 32", "Resize to 8 x 32"]),
        (lambda m: m(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)), ["floating-point", "uint8"]),
        (lambda m: m(pixels(), torch.ones(3)), ["head_mask", "[4] or [2, 4]", "[3]"]),
        (lambda m: m.attention(pixels(), layers=2), ["layers", "0 and 1", "got 2"]),
        (lambda m: m.attention(pixels(), heads=[0, 4]), ["heads", "got 4"]),
        (lambda m: m.attention(pixels(), query=17), ["query", "got 17"]),
        (lambda m: m.set_image_size(33), ["33", "multiple"]),
        (lambda m: ViT(img_size=224, patch_size=16), ["ViTConfig", "vitkit.paper.ViT"]),
        (lambda m: ViT(224), ["vitkit.paper.ViT"]),
        (lambda m: ViT(), ["vitkit.create"]),
    ],
)
def test_bad_input(call, words) -> None:
    with pytest.raises(VitkitError) as caught:
        call(tiny())
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{}, {"layer_scale": 0.3, "num_register_tokens": 2, "qkv_bias": False}, {"pruned_heads": {1: [0, 2]}}]
)
def test_rows_are_the_same_numbers_for_fewer_tokens(changes) -> None:
    """The last block computes only the class token, forward and backward, and nothing else changes."""
    model, x, found = tiny(**changes), pixels(), []
    for logits in (model.classify(model.norm(model.encode(x)[:, 0])), model(x)):
        model.zero_grad()
        logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for all_tokens, one_token in zip(*found, strict=True):
        assert (all_tokens - one_token).abs().max() <= 5e-6 * all_tokens.abs().max().clamp(min=1)
    z, rows = model.embed(x), torch.tensor([4, 0])
    block, grid = model.blocks[0], model.config.grid
    torch.testing.assert_close(block(z, grid, rows), block(z, grid)[:, rows])
    torch.testing.assert_close(block.attention(z, grid, rows=rows), block.attention(z, grid)[:, :, rows])


def test_what_is_seen_is_the_attention_that_was_used() -> None:
    model, x = tiny(), pixels()
    z, block, seen = model.embed(x), model.blocks[0], {"A": None, "q": None, "k": None, "v": None}
    grid = model.grid_of(x)
    torch.testing.assert_close(block(z, grid, seen=seen), block(z, grid))
    assert torch.equal(seen["A"], model.attention(x)[0])
    for name, value in zip("qkv", block.msa.project(block.norm1(z), grid), strict=False):
        assert torch.equal(seen[name], value)
    bias = torch.randn(2, 1, 1, z.shape[1])
    torch.testing.assert_close(block(z, grid, bias=bias, seen={"A": None}), block(z, grid, bias=bias))
    assert (block(z, grid, bias=bias) - block(z, grid)).abs().max() > 1e-3


def test_no_heads_is_not_all_heads() -> None:
    assert tiny().attention(pixels(), heads=[])[0].shape[1] == 0
