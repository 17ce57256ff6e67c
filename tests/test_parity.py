"""One set of weights, six implementations, one answer: paper.ViT, vitkit.ViT, the twelve classes, timm, torchvision,
transformers. Every parameter is random and none is zero; epsilon, GELU and position rule are set equal.

The bar is relative, since fp32 rounds: max|difference| <= 5e-6 x the largest value of the reference.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import vitkit
from tests.peers import (
    DOORS,
    Answer,
    as_paper,
    as_timm,
    as_torchvision,
    as_transformers,
    as_twelve,
    of_vit,
    peer,
)
from vitkit import ViT, ViTConfig, huggingface, paper
from vitkit.checkpoints import from_dialect, to_dialect

BAR = 5e-6
TINY = ViTConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    image_size=32,
    patch_size=8,
    num_classes=7,
    layer_norm_eps=1e-6,
)


def tiny(**changes) -> ViTConfig:
    return dataclasses.replace(TINY, **changes)


@torch.no_grad()
def filled(config: ViTConfig) -> ViT:
    """A ViT of which every parameter is random and no value is zero, with activations of a healthy size."""
    model = ViT(config).eval()
    for name, p in model.named_parameters():
        if p.dim() > 1 and "token" not in name and "positions" not in name:
            p.normal_(std=p[0].numel() ** -0.5)
        else:
            p.normal_(std=0.5)
        if "norm" in name and name.endswith("weight"):
            p.add_(1)
        p[p == 0] = 0.1
        assert p.all(), name
    return model


def pixels(config: ViTConfig, batch: int = 2, size: tuple[int, int] | None = None) -> Tensor:
    return torch.randn(batch, config.num_channels, *(size or config.image_hw))


def same(ours: Tensor, theirs: Tensor, bar: float = BAR) -> None:
    """Refuse a difference over the bar, and a reference that would let anything pass."""
    assert ours.shape == theirs.shape
    top = theirs.abs().max().item()
    assert theirs.std() > 1e-3 * top > 0, "the reference is trivial"
    assert (ours - theirs).abs().max().item() <= bar * top


def agree(ours: Answer, theirs: Answer) -> set[str]:
    """Compare all that both show; return the names of what was compared."""
    compared = {name for name, value in vars(theirs).items() if value is not None}
    assert theirs.logits.std(0).max() > 0.05, "different images must get different logits"
    for name in compared:
        a, b = (value if isinstance(value, tuple) else (value,) for value in (vars(ours)[name], vars(theirs)[name]))
        assert len(a) == len(b)
        for mine, other in zip(a, b, strict=True):
            same(mine, other)
    return compared


ALL = ("paper", "twelve", "timm", "torchvision", "transformers", "transformers-sdpa")
NOT_TORCHVISION = tuple(door for door in ALL if door != "torchvision")  # square, three channels, exact GELU, biases
CASES: dict[str, tuple[ViTConfig, tuple[str, ...]]] = {
    "tiny": (TINY, ALL),
    "eps 1e-12": (tiny(layer_norm_eps=1e-12), ALL),
    "eps 1e-5": (tiny(layer_norm_eps=1e-5), ALL),
    "gelu tanh": (tiny(hidden_act="gelu_tanh"), NOT_TORCHVISION),
    "patch 14": (tiny(patch_size=14, image_size=56), ALL),
    "patch 32": (tiny(patch_size=32, image_size=96), ALL),
    "384 px": (tiny(patch_size=16, image_size=384), ALL),
    "non-square": (tiny(image_size=(24, 48)), NOT_TORCHVISION),
    "grayscale": (tiny(num_channels=1), NOT_TORCHVISION),
    "five channels": (tiny(num_channels=5), NOT_TORCHVISION),
    "no qkv bias": (tiny(qkv_bias=False), ("twelve", "timm", "transformers", "transformers-sdpa")),
    "odd mlp": (tiny(intermediate_size=50), ALL),
    "one head": (tiny(num_attention_heads=1), ALL),
    "layer scale": (tiny(layer_scale=0.1), ("timm",)),
    "registers": (tiny(num_register_tokens=3), ("timm",)),
    "patches alone have positions": (tiny(prefix_positions=False), ALL),
    "mean, norm before": (tiny(pool="mean"), ("timm",)),
    "mean, norm after": (tiny(pool="mean", norm_after_pool=True), ("timm",)),
    "no class token": (tiny(pool="mean", class_token=False), ("timm",)),
    "pre-logits": (tiny(pre_logits=True), ("torchvision",)),
}
SHOWN = {  # what each door must have shown: a comparison that compares less is a failure
    "paper": {"logits", "states", "attentions", "tokens"},
    "twelve": {"logits", "states", "attentions", "tokens"},
    "timm": {"logits", "states", "attentions", "tokens"},
    "torchvision": {"logits", "states", "tokens"},
    "transformers": {"logits", "states", "attentions", "tokens"},
    "transformers-sdpa": {"logits"},
}


@pytest.mark.parametrize(("case", "door"), [(case, door) for case, (_, doors) in CASES.items() for door in doors])
def test_one_set_of_weights_one_answer(case, door):
    config, _ = CASES[case]
    vit, x = filled(config), pixels(config)
    with torch.no_grad():
        compared = agree(of_vit(vit)(x), DOORS[door](vit)(x))
    assert compared == SHOWN[door] - ({"tokens"} if config.norm_after_pool else set())


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(2, 9),
    st.integers(1, 40),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(["gelu", "gelu_tanh"]),
)
@torch.no_grad()
def test_the_three_doors_agree_for_any_shape(layers, heads, head_size, mlp, grid, patch, channels, act):
    torch.manual_seed(0)
    config = ViTConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_size=heads * head_size,
        intermediate_size=mlp,
        image_size=(grid[0] * patch, grid[1] * patch),
        patch_size=patch,
        num_channels=channels,
        num_classes=5,
        hidden_act=act,
        layer_norm_eps=1e-3,
    )
    vit, x = filled(config).double(), pixels(config).double()
    logits = as_paper(vit)(x)
    same(vit(x), logits, bar=1e-12)
    same(as_twelve(vit)(x).logits, logits, bar=1e-12)


def test_the_true_b16():
    """Twelve layers of width 768, 224 px, 1000 classes: all doors."""
    vit = filled(vitkit.create("vit-b/16").config)
    x = pixels(vit.config, batch=1)
    with torch.no_grad():
        states, logits, attention = vit.hidden_states(x), vit(x), vit.attention(x, layers=-1)[11]
        assert logits.std() > 0.1
        assert (vit(x.flip(-1)) - logits).abs().max() > 0.1
        for as_model in (as_paper, as_timm, as_torchvision):
            same(logits, as_model(vit)(x))
        for as_model in (as_twelve, as_transformers):
            out = as_model(vit)(x, output_hidden_states=True, output_attentions=True)
            same(logits, out.logits)
            same(attention, out.attentions[11])
            for ours, theirs in zip(states, out.hidden_states, strict=True):
                same(ours, theirs)


@pytest.mark.parametrize("door", DOORS)
def test_in_double_precision_only_rounding_is_left(door):
    vit = filled(TINY).double()
    x = pixels(TINY).double()
    with torch.no_grad():
        ours, theirs = vit(x), DOORS[door](vit)(x).logits
    assert theirs.dtype == torch.float64
    same(ours, theirs, bar=BAR if door == "transformers" else 1e-13)  # its eager softmax is always fp32


def test_every_parameter_counts():
    """Parity proves something only if each parameter can spoil it."""
    vit, x = filled(TINY), pixels(TINY)
    with torch.no_grad():
        before = vit(x)
        for name, p in vit.named_parameters():
            kept = p.clone()
            p.add_(0.05 * torch.randn_like(p))
            assert (vit(x) - before).abs().max() > 100 * BAR * before.abs().max(), name
            p.copy_(kept)


def test_gradients_agree():
    vit, x = filled(TINY), pixels(TINY)

    def gradient(model) -> Tensor:
        image = x.clone().requires_grad_()
        out = model(image)
        logits = out if isinstance(out, Tensor) else out.logits
        logits.square().sum().backward()
        return image.grad

    ours = gradient(vit)
    for model in (as_paper(vit), as_twelve(vit), as_timm(vit), as_torchvision(vit), as_transformers(vit)):
        same(ours, gradient(model), bar=2e-5)  # a gradient rounds twice


def test_pooled_output():
    """The pre-logits layer is Hugging Face's pooler."""
    config = tiny(pre_logits=True, num_classes=0)
    vit, x = filled(config), pixels(config)
    twelve = huggingface.ViTModel(config).eval()
    twelve.load_state_dict(to_dialect(vit, "huggingface"), strict=True)
    with torch.no_grad():
        for model in (twelve, as_transformers(vit, "ViTModel")):
            out = model(x)
            same(vit(x), out.pooler_output)
            same(vit.features(x), out.last_hidden_state[:, 0])


def test_masked_patches_equal_the_librarys():
    transformers = peer("transformers")
    theirs = transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
        ),
        use_mask_token=True,
    ).eval()
    ours = huggingface.ViTModel(tiny(layer_norm_eps=1e-12), use_mask_token=True).eval()
    vit = filled(tiny(layer_norm_eps=1e-12, pre_logits=True, num_classes=0))
    tensors = to_dialect(vit, "huggingface") | {"embeddings.mask_token": torch.randn(1, 1, 32)}
    ours.load_state_dict(tensors, strict=True)
    theirs = transformers.ViTModel.from_pretrained(None, config=theirs.config, state_dict=tensors, use_mask_token=True)
    x, mask = pixels(TINY), torch.rand(2, 16) < 0.5
    with torch.no_grad():
        out = ours(x, bool_masked_pos=mask).last_hidden_state
        same(out, theirs.eval()(x, bool_masked_pos=mask).last_hidden_state)
        assert (out - ours(x).last_hidden_state).abs().max() > 0.1


# Other image sizes: the six rules against each library's own resizing.

OLD = tiny(patch_size=16, image_size=224, num_hidden_layers=1)  # 14 x 14 patches


def with_positions(vit: ViT, size: tuple[int, int], grid: Tensor) -> paper.ViT:
    """paper.ViT of another size, with patch positions [1, D, rows, columns] that somebody else has resized."""
    bigger = ViT(dataclasses.replace(vit.config, image_size=size)).eval()
    table = torch.cat([vit.positions.table[:, :1], grid.flatten(2).mT], dim=1)
    bigger.load_state_dict(vit.state_dict() | {"positions.table": table})
    return as_paper(bigger)


def by_google(vit: ViT, size: tuple[int, int]) -> paper.ViT:
    from scipy.ndimage import zoom

    table = vit.positions.table[0, 1:].unflatten(0, (14, 14)).numpy()
    rows, columns = size[0] // 16, size[1] // 16
    zoomed = zoom(table, (rows / 14, columns / 14, 1), order=1)
    return with_positions(vit, size, torch.from_numpy(zoomed).permute(2, 0, 1)[None])


def by_dinov2(vit: ViT, size: tuple[int, int]) -> paper.ViT:
    table = vit.positions.table[:, 1:].mT.unflatten(2, (14, 14))
    scale = [(side // 16 + 0.1) / 14 for side in size]
    return with_positions(vit, size, F.interpolate(table, scale_factor=scale, mode="bicubic"))


def by_siglip2(vit: ViT, size: tuple[int, int]) -> paper.ViT:
    """transformers' own function, for one image that fills its grid."""
    Embeddings = peer("transformers.models.siglip2.modeling_siglip2").Siglip2VisionEmbeddings
    table, grid = vit.positions.table[0, 1:].unflatten(0, (14, 14)), (size[0] // 16, size[1] // 16)
    resized = Embeddings.resize_positional_embeddings(table, torch.tensor([grid]), max_length=grid[0] * grid[1])
    return with_positions(vit, size, resized.mT.unflatten(2, grid))


def by_timm_npz(vit: ViT, size: tuple[int, int]) -> nn.Module:
    """timm's own function with what its reader of Google's files passes."""
    tensors, grid = to_dialect(vit, "timm"), (size[0] // 16, size[1] // 16)
    resample = peer("timm.layers").resample_abs_pos_embed
    tensors["pos_embed"] = resample(tensors["pos_embed"], grid, (14, 14), interpolation="bilinear", antialias=False)
    model = as_timm(vit, image_size=size)
    model.load_state_dict(tensors, strict=True)
    return model


def by_torchvision(vit: ViT, size: tuple[int, int]) -> nn.Module:
    vision_transformer = peer("torchvision.models.vision_transformer")
    tensors = vision_transformer.interpolate_embeddings(size[0], 16, to_dialect(vit, "torchvision"))
    model = as_torchvision(vit, image_size=size[0])
    model.load_state_dict(tensors, strict=True)
    return model


def by_hub(as_model):
    def build(vit: ViT, size: tuple[int, int]):
        model = as_model(vit)
        return lambda x: model(x, interpolate_pos_encoding=True).logits

    return build


RESIZERS = {  # position rule -> who else resizes that way
    "google": {"scipy": by_google},
    "timm-npz": {"timm": by_timm_npz},
    "timm": {"timm": lambda vit, size: as_timm(vit, dynamic_img_size=True)},
    "huggingface": {"transformers": by_hub(as_transformers), "twelve": by_hub(as_twelve)},
    "torchvision": {"torchvision": by_torchvision},
    "dinov2": {"paper": by_dinov2},
    "siglip2": {"transformers": by_siglip2},
}


@pytest.mark.parametrize("size", [(384, 384), (160, 320), (112, 112)])
@pytest.mark.parametrize(("rule", "who"), [(rule, who) for rule, row in RESIZERS.items() for who in row])
@torch.no_grad()
def test_positions_are_resized_as_the_library_does(rule, who, size):
    if rule == "torchvision":
        size = (max(size), max(size))  # it takes squares only
    vit = filled(dataclasses.replace(OLD, position_resize=rule))
    x = pixels(vit.config, size=size)
    ours = vit(x)
    same(ours, RESIZERS[rule][who](vit, size)(x))
    others = {other: filled_like(vit, other)(x) for other in RESIZERS if other != rule}
    if min(size) > 224:  # antialiasing changes nothing when a grid grows: these two are then one rule
        others.pop({"timm-npz": "siglip2", "siglip2": "timm-npz"}.get(rule), None)
    for other, logits in others.items():  # the rules can be told apart at this size
        assert (logits - ours).abs().max() > 20 * BAR * ours.abs().max(), other


def filled_like(vit: ViT, rule: str) -> ViT:
    model = ViT(dataclasses.replace(vit.config, position_resize=rule)).eval()
    model.load_state_dict(vit.state_dict())
    return model


def test_the_positions_table_covers_every_rule():
    from vitkit.model.parts.positions import RULES

    assert set(RESIZERS) == set(RULES)


# Masks and pruning, against paper.py with the columns of U_msa that belong to a head multiplied by its mask.


def masked_paper(vit: ViT, mask: Tensor) -> paper.ViT:
    model, d = as_paper(vit), vit.config.head_size
    with torch.no_grad():
        for block, row in zip(model.transformer_encoder, mask, strict=True):
            block.msa_block.multihead_attn.out_proj.weight.mul_(row.repeat_interleave(d))
    return model


@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=8, max_size=8))
@torch.no_grad()
def test_head_masks(values):
    torch.manual_seed(0)
    vit, x, mask = filled(TINY), pixels(TINY), torch.tensor(values).view(2, 4)
    expected = masked_paper(vit, mask)(x)
    same(vit(x, head_mask=mask), expected)
    twelve = as_twelve(vit)
    out = twelve(x, head_mask=mask, output_hidden_states=True, output_attentions=True)
    same(out.logits, expected)
    for ours, theirs in zip(vit.hidden_states(x, head_mask=mask), out.hidden_states, strict=True):
        same(ours, theirs)
    for row, A in zip(mask, out.attentions, strict=True):  # Hugging Face returned the masked attention
        torch.testing.assert_close(A.sum(-1), row.view(1, 4, 1).expand(2, 4, 17), rtol=0, atol=1e-6)
    if not mask.all():
        assert (expected - vit(x)).abs().max() > 0.01
    same(vit(x, head_mask=mask[0]), masked_paper(vit, mask[:1].expand(2, 4))(x))  # one row for all layers


@pytest.mark.parametrize("heads", [{0: [1]}, {0: [0, 2], 1: [3]}, {0: [0, 1, 2], 1: [1, 2, 3]}])
@torch.no_grad()
def test_pruned_heads(heads):
    vit, x, mask = filled(TINY), pixels(TINY), torch.ones(2, 4)
    for layer, gone in heads.items():
        mask[layer, gone] = 0
    expected = masked_paper(vit, mask)(x)
    whole, twelve = copy.deepcopy(vit), as_twelve(vit)
    assert (expected - vit(x)).abs().max() > 0.01
    twelve.prune_heads(heads)
    vit.prune_heads(heads)
    same(vit(x), expected)
    same(twelve(x).logits, expected)
    moved = as_twelve(vit)  # built pruned, weights by the dialect
    assert moved.config.pruned_heads == vit.config.pruned_heads == twelve.config.pruned_heads
    assert {k: v.shape for k, v in moved.state_dict().items()} == {k: v.shape for k, v in twelve.state_dict().items()}
    same(moved(x).logits, expected)
    more = torch.tensor([[0.5, 1, 0, 1], [1, 0.5, 1, 0]])  # masks name heads by original number, pruned or not
    expected = masked_paper(whole, mask * more)(x)
    same(vit(x, head_mask=more), expected)
    same(twelve(x, head_mask=more).logits, expected)
    back = ViT(vit.config).eval()
    back.load_state_dict(from_dialect(twelve.state_dict(), "huggingface", vit.config))
    assert torch.equal(back(x), vit(x))


# The parts.


@torch.no_grad()
def test_one_block_is_torchs_encoder_layer():
    vit, z = filled(TINY), torch.randn(2, 17, 32)
    theirs = nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    ).eval()
    block = vit.blocks[0]
    parts = {
        "norm1": block.norm1,
        "norm2": block.norm2,
        "linear1": block.mlp.fc1,
        "linear2": block.mlp.fc2,
        "self_attn.out_proj": block.msa.out,
    }
    theirs.load_state_dict(
        {f"{name}.{kind}": getattr(part, kind) for name, part in parts.items() for kind in ("weight", "bias")}
        | {"self_attn.in_proj_weight": block.msa.qkv.weight, "self_attn.in_proj_bias": block.msa.qkv.bias}
    )
    expected = theirs(z)
    same(block(z, vit.config.grid), expected)
    same(as_paper(vit).transformer_encoder[0](z), expected)
    same(as_twelve(vit).vit.encoder.layer[0](z)[0], expected)


@pytest.mark.parametrize("config", [TINY, tiny(patch_size=14, image_size=(28, 42), num_channels=2)])
@torch.no_grad()
def test_the_convolution_is_the_linear_projection_of_flattened_patches(config):
    vit, x, P = filled(config), pixels(config), config.patch_size
    E = vit.patch_embedding.projection.weight.flatten(1).T  # [P^2 C, D]
    bias = vit.patch_embedding.projection.bias
    (B, C, H, W) = x.shape
    x_p = x.view(B, C, H // P, P, W // P, P).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, N, C P^2]
    assert torch.equal(x_p, nn.Unfold(P, stride=P)(x).mT)
    expected = x_p @ E + bias  # Eq. 1
    assert expected.shape == (B, config.num_patches, config.hidden_size)
    same(vit.patch_embedding(x)[0], expected)
    same(as_paper(vit).patch_embedding(x), expected)
    same(as_twelve(vit).vit.embeddings.patch_embeddings(x), expected)


@torch.no_grad()
def test_attention_is_eq_6_written_out():
    vit, x = filled(TINY), pixels(TINY)
    ours = vit.attention(x)
    assert list(ours) == [0, 1]
    of_paper, of_twelve = as_paper(vit)(x, need_weights=True)[1], as_twelve(vit)(x, output_attentions=True)
    for layer, z in enumerate(vit.hidden_states(x)[:2]):
        block = vit.blocks[layer]
        U_qkv, bias = block.msa.qkv.weight.T, block.msa.qkv.bias
        q, k, _ = (block.norm1(z) @ U_qkv + bias).chunk(3, dim=-1)  # Eq. 5
        A = torch.stack(
            [
                (q[..., i : i + 8] @ k[..., i : i + 8].mT / 8**0.5).softmax(-1)  # Eq. 6, head by head
                for i in range(0, 32, 8)
            ],
            dim=1,
        )
        assert A.std() > 0.01
        for other in (A, of_paper[layer], of_twelve.attentions[layer]):
            torch.testing.assert_close(ours[layer], other, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours[layer].sum(-1), torch.ones(2, 4, 17), rtol=0, atol=1e-6)
        part = vit.attention(x, layers=layer, heads=[2, 0], query=[0, 5])[layer]
        torch.testing.assert_close(part, A[:, [2, 0]][:, :, [0, 5]], rtol=0, atol=1e-6)


# What must not change the answer.


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_size_feed_forward": 1},
        {"chunk_size_feed_forward": 5},
        {"chunk_size_feed_forward": 100},
        {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5},
    ],
)
@torch.no_grad()
def test_chunks_and_dropout_leave_evaluation_alone(changes):
    config = tiny(**changes)
    vit, x = filled(config), pixels(config)
    expected = as_paper(vit)(x)
    same(vit(x), expected)
    same(as_twelve(vit)(x).logits, expected)
    if "hidden_dropout_prob" in changes:
        assert (vit.train()(x) - expected).abs().max() > 0.01
        assert (as_twelve(vit).train()(x).logits - expected).abs().max() > 0.01


@torch.no_grad()
def test_stochastic_depth_leaves_evaluation_alone():
    config = tiny(drop_path_rate=0.9)
    vit, x = filled(config), pixels(config)
    same(vit(x), as_paper(vit)(x))
    assert (vit.train()(x) - vit.eval()(x)).abs().max() > 0.01


def test_gradient_checkpointing_gives_equal_gradients():
    vit, x = filled(TINY).train(), pixels(TINY)
    calls = []
    vit.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    grads = []
    for on in (False, True):
        vit.gradient_checkpointing = on
        vit.zero_grad()
        vit(x).square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in vit.named_parameters()})
    assert len(calls) == 3  # the second time it ran again for the gradient
    for name, grad in grads[0].items():
        assert grad.any()
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own imports
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_whole_equals_eager(backend):
    vit, x, other = filled(TINY), pixels(TINY), pixels(TINY, size=(40, 32))
    twelve, plain = as_twelve(vit), as_paper(vit)
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            compiled = torch.compile(vit, fullgraph=True, backend=backend)
            same(compiled(x), vit(x))
            same(compiled(other), vit(other))
            same(torch.compile(twelve, fullgraph=True, backend=backend)(x).logits, twelve(x).logits)
            same(torch.compile(plain, fullgraph=True, backend=backend)(x), plain(x))
    finally:
        torch._dynamo.reset()


def test_meta_device_then_weights():
    vit, x = filled(TINY), pixels(TINY)
    with torch.device("meta"):
        empty = [ViT(TINY), paper.ViT(32, 3, 8, 2, 32, 64, 4, 7), huggingface.ViTForImageClassification(TINY)]
    names = ("native", "course", "huggingface")
    for model, dialect in zip(empty, names, strict=True):
        assert {p.device.type for p in model.parameters()} == {"meta"}
        model.load_state_dict(to_dialect(vit, dialect), strict=True, assign=True)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = TINY.layer_norm_eps
        out = model.eval()(x)
        same(out if isinstance(out, Tensor) else out.logits, vit(x))


@torch.no_grad()
def test_real_weights_and_a_real_photo(shared_data):
    """ViT-Ti/16 as published, through every door."""
    from PIL import Image

    file = shared_data / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth"
    config = vitkit.create("vit-ti/16").config
    vit = ViT(config).eval()
    vit.load_state_dict(from_dialect(torch.load(file, weights_only=True), "timm", config))
    photo = sorted((shared_data / "imagenet_val_500" / "388").glob("*"))[0]
    image = Image.open(photo).convert("RGB").resize((224, 224), Image.Resampling.BICUBIC)
    x = torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1)[None] / 127.5 - 1
    x = torch.cat([x, x.flip(-1)])
    logits = vit(x)
    assert logits.argmax(-1).tolist() == [388, 388]  # a giant panda
    for door in DOORS.values():
        same(logits, door(vit)(x).logits)
