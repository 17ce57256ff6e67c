"""The five classes: what learners know of them (names, shapes, defaults, file names), and their errors."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitkit import paper
from vitkit.errors import ConfigError, InputError, VitkitError

TINY = {
    "img_size": 32,
    "patch_size": 8,
    "num_transformer_layers": 2,
    "embedding_dim": 32,
    "mlp_size": 64,
    "num_heads": 4,
    "num_classes": 5,
}


def defaults(cls: type) -> dict[str, object]:
    return {name: p.default for name, p in inspect.signature(cls).parameters.items()}


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (paper.PatchEmbedding, {"in_channels": 3, "patch_size": 16, "embedding_dim": 768}),
        (paper.MultiheadSelfAttentionBlock, {"embedding_dim": 768, "num_heads": 12, "attn_dropout": 0}),
        (paper.MultiHeadSelfAttentionBlock, {"embedding_dimension": 768, "num_heads": 12, "attn_dropout": 0}),
        (paper.MLPBlock, {"embedding_dim": 768, "mlp_size": 3072, "dropout": 0.1}),
        (
            paper.TransformerEncoderBlock,
            {"embedding_dim": 768, "num_heads": 12, "mlp_size": 3072, "mlp_dropout": 0.1, "attn_dropout": 0},
        ),
        (
            paper.ViT,
            {
                "img_size": 224,
                "in_channels": 3,
                "patch_size": 16,
                "num_transformer_layers": 12,
                "embedding_dim": 768,
                "mlp_size": 3072,
                "num_heads": 12,
                "num_classes": 1000,
                "attn_dropout": 0,
                "mlp_dropout": 0.1,
                "embedding_dropout": 0.1,
                "pre_logits": False,
                "authors_start": False,
            },
        ),
    ],
)
def test_names_order_and_defaults_are_those_learners_know(cls, expected):
    assert list(defaults(cls).items()) == list(expected.items())


def test_what_the_lesson_does_not_have_is_keyword_only():
    kinds = {name: p.kind for name, p in inspect.signature(paper.ViT).parameters.items()}
    assert [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY] == [
        "attn_dropout",
        "mlp_dropout",
        "embedding_dropout",
        "pre_logits",
        "authors_start",
    ]


def test_it_imports_nothing_of_ours_but_errors():
    tree = ast.parse(Path(paper.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"__future__", "torch", "vitkit.errors"}


def test_state_dict_names_are_the_course_files():
    block = [
        "msa_block.layer_norm.weight",
        "msa_block.layer_norm.bias",
        "msa_block.multihead_attn.in_proj_weight",
        "msa_block.multihead_attn.in_proj_bias",
        "msa_block.multihead_attn.out_proj.weight",
        "msa_block.multihead_attn.out_proj.bias",
        "mlp_block.layer_norm.weight",
        "mlp_block.layer_norm.bias",
        "mlp_block.mlp.0.weight",
        "mlp_block.mlp.0.bias",
        "mlp_block.mlp.3.weight",
        "mlp_block.mlp.3.bias",
    ]
    expected = [
        "class_embedding",
        "position_embedding",
        "patch_embedding.patcher.weight",
        "patch_embedding.patcher.bias",
        *(f"transformer_encoder.{i}.{name}" for i in range(2) for name in block),
        "classifier.0.weight",
        "classifier.0.bias",
        "classifier.1.weight",
        "classifier.1.bias",
    ]
    state = paper.ViT(**TINY).state_dict()
    assert list(state) == expected
    assert state["class_embedding"].shape == (1, 1, 32)
    assert state["position_embedding"].shape == (1, 17, 32)


def test_parts_are_torchs_own():
    model = paper.ViT(**TINY)
    block = model.transformer_encoder[0]
    assert isinstance(model.patch_embedding.patcher, nn.Conv2d)
    assert isinstance(model.patch_embedding.flatten, nn.Flatten)
    assert isinstance(model.transformer_encoder, nn.Sequential)
    assert isinstance(block.msa_block.multihead_attn, nn.MultiheadAttention)
    assert block.msa_block.multihead_attn.batch_first
    assert [type(part) for part in block.mlp_block.mlp] == [nn.Linear, nn.GELU, nn.Dropout, nn.Linear, nn.Dropout]
    assert block.mlp_block.mlp[1].approximate == "none"
    assert [type(part) for part in model.classifier] == [nn.LayerNorm, nn.Linear]
    assert isinstance(model.embedding_dropout, nn.Dropout)


def test_default_is_b16_with_its_exact_parameters():
    with torch.device("meta"):
        model = paper.ViT()
        shape = model(torch.empty(1, 3, 224, 224)).shape
    assert sum(p.numel() for p in model.parameters()) == 86_567_656
    assert shape == (1, 1000)


def test_shapes_step_by_step():
    patches = paper.PatchEmbedding()
    x = torch.randn(1, 3, 224, 224)
    assert patches.patcher(x).shape == (1, 768, 14, 14)
    assert patches.flatten(patches.patcher(x)).shape == (1, 768, 196)
    assert patches(x).shape == (1, 196, 768)
    z = torch.randn(2, 197, 768)
    for block in (paper.MultiheadSelfAttentionBlock(), paper.MLPBlock(), paper.TransformerEncoderBlock()):
        assert block(z).shape == z.shape


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from([4, 7]), st.integers(1, 3))
def test_any_fitting_shape_runs(channels, rows, columns, patch, heads):
    model = paper.ViT((rows * patch, columns * patch), channels, patch, 1, 4 * heads, 8, heads, 3).eval()
    x = torch.randn(2, channels, rows * patch, columns * patch)
    logits, (A,) = model(x, need_weights=True)
    T = rows * columns + 1
    assert logits.shape == (2, 3)
    assert A.shape == (2, heads, T, T)


def test_the_blocks_leave_the_residual_to_the_encoder_block():
    block = paper.TransformerEncoderBlock(32, 4, 64).eval()
    z = torch.randn(2, 5, 32)
    middle = block.msa_block(z) + z
    torch.testing.assert_close(block(z), block.mlp_block(middle) + middle)
    with torch.no_grad():
        for p in [*block.msa_block.multihead_attn.out_proj.parameters(), *block.mlp_block.mlp[3].parameters()]:
            p.zero_()
    assert not block.msa_block(z).any()
    assert not block.mlp_block(z).any()
    torch.testing.assert_close(block(z), z, rtol=0, atol=0)


def test_attention_on_request_is_eq_6_and_changes_nothing_else():
    model = paper.ViT(**TINY).eval()
    x = torch.randn(2, 3, 32, 32)
    logits, attentions = model(x, need_weights=True)
    torch.testing.assert_close(logits, model(x), rtol=0, atol=1e-6)
    assert [tuple(A.shape) for A in attentions] == [(2, 4, 17, 17)] * 2
    z = model.embed(x)
    for block, A in zip(model.transformer_encoder, attentions, strict=True):
        attn = block.msa_block.multihead_attn
        q, k, _ = (block.msa_block.layer_norm(z) @ attn.in_proj_weight.mT + attn.in_proj_bias).chunk(3, -1)
        q, k = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (q, k))
        torch.testing.assert_close(A, (q @ k.mT / 8**0.5).softmax(-1), rtol=0, atol=1e-6)
        torch.testing.assert_close(A.sum(-1), torch.ones(2, 4, 17), rtol=0, atol=1e-6)
        z = block(z)


def test_the_other_spelling_is_the_same_block():
    first = paper.MultiheadSelfAttentionBlock(32, 4)
    other = paper.MultiHeadSelfAttentionBlock(embedding_dimension=32, num_heads=4)
    other.load_state_dict(first.state_dict())
    z = torch.randn(1, 3, 32)
    assert isinstance(other, paper.MultiheadSelfAttentionBlock)
    torch.testing.assert_close(other(z), first(z), rtol=0, atol=0)


def test_dropout_acts_in_training_only_and_where_it_was_asked_for():
    x = torch.randn(1, 3, 32, 32)
    for name in ("attn_dropout", "mlp_dropout", "embedding_dropout"):
        rates = {"attn_dropout": 0, "mlp_dropout": 0, "embedding_dropout": 0}
        still = paper.ViT(**TINY, **rates).train()
        torch.testing.assert_close(still(x), still(x), rtol=0, atol=0)
        model = paper.ViT(**TINY, **(rates | {name: 0.5})).train()
        assert not torch.equal(model(x), model(x)), name
        torch.testing.assert_close(model.eval()(x), model(x), rtol=0, atol=0)


def test_gradients_reach_every_parameter():
    model = paper.ViT(**TINY)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "error", "numbers"),
    [
        (lambda: paper.PatchEmbedding(3, 16, 8)(torch.zeros(1, 3, 33, 32)), InputError, ("height", "33", "16")),
        (lambda: paper.PatchEmbedding(3, 16, 8)(torch.zeros(1, 3, 32, 40)), InputError, ("width", "40", "16")),
        (
            lambda: paper.PatchEmbedding(3, 16, 8)(torch.zeros(1, 1, 32, 32)),
            InputError,
            ("[batch, 3,", "[1, 1, 32, 32]"),
        ),
        (lambda: paper.PatchEmbedding(3, 16, 8)(torch.zeros(3, 32, 32)), InputError, ("[3, 32, 32]", "unsqueeze")),
        (lambda: paper.PatchEmbedding(patch_size=0), ConfigError, ("patch_size", "0")),
        (lambda: paper.MultiheadSelfAttentionBlock(32, 5), ConfigError, ("num_heads", "5", "32")),
        (lambda: paper.MultiHeadSelfAttentionBlock(32, 0), ConfigError, ("num_heads", "0")),
        (lambda: paper.TransformerEncoderBlock(30, 4), ConfigError, ("4", "30")),
        (lambda: paper.MLPBlock(32, 0), ConfigError, ("mlp_size", "0")),
        (lambda: paper.ViT(img_size=100), ConfigError, ("img_size", "100", "16", "Use 96")),
        (lambda: paper.ViT(**TINY | {"img_size": (32, 36)}), ConfigError, ("36", "8")),
        (lambda: paper.ViT(**TINY | {"num_classes": 0}), ConfigError, ("num_classes", "0")),
        (lambda: paper.ViT(**TINY)(torch.zeros(1, 3, 40, 32)), InputError, ("32 x 32", "40 x 32", "img_size=(40, 32)")),
        (lambda: paper.ViT(**TINY)(torch.zeros(1, 3, 33, 32)), InputError, ("33", "8")),
        (lambda: paper.ViT(**TINY)(torch.zeros(32)), InputError, ("[32]",)),
    ],
)
def test_bad_input_is_named_with_both_numbers(make, error, numbers):
    with pytest.raises(error) as caught:
        make()
    assert isinstance(caught.value, VitkitError)
    for number in numbers:
        assert number in str(caught.value)
