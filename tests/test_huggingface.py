"""The twelve classes: the interface Hugging Face users know, their state_dict names, and their errors.

That they compute what the library computes is shown in test_parity.py.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vitkit.model.config
from tests.peers import peer
from vitkit import huggingface as hf
from vitkit.errors import ConfigError, InputError

D, L, H, T = 32, 2, 4, 17
TINY = {
    "hidden_size": D,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
    "initializer_range": 0.5,
}


def tiny(**changes) -> hf.ViTConfig:
    return hf.ViTConfig(**TINY | changes)


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3, 32, 32)))


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


def test_there_is_one_config_class():
    assert hf.ViTConfig is vitkit.model.config.ViTConfig
    config = hf.ViTConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.intermediate_size) == (
        768,
        12,
        12,
        3072,
    )
    assert (config.layer_norm_eps, config.hidden_act, config.image_size, config.patch_size) == (1e-12, "gelu", 224, 16)
    assert tiny().num_classes == tiny().num_labels == 5


def test_it_imports_nothing_of_ours_but_errors_and_config():
    tree = ast.parse(Path(hf.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {module for module in modules if module.startswith("vitkit")}
    assert ours == {
        "vitkit",
        "vitkit.errors",
        "vitkit.model.config",
        "vitkit.model.parts.fit",
        "vitkit.model.parts.layers",
    }


def test_the_twelve_signatures():
    assert parameters(hf.PatchEmbeddings.__init__) == ["image_size", "patch_size", "num_channels", "embed_dim"]
    assert parameters(hf.ViTModel.__init__) == ["config", "add_pooling_layer", "use_mask_token"]
    assert parameters(hf.ViTModel.forward) == [
        "pixel_values",
        "bool_masked_pos",
        "head_mask",
        "output_attentions",
        "output_hidden_states",
        "interpolate_pos_encoding",
        "return_dict",
    ]
    assert parameters(hf.ViTLayer.forward) == ["hidden_states", "head_mask", "output_attentions"]
    for cls in (
        hf.ViTEmbeddings,
        hf.ViTSelfAttention,
        hf.ViTSelfOutput,
        hf.ViTAttention,
        hf.ViTIntermediate,
        hf.ViTOutput,
        hf.ViTLayer,
        hf.ViTEncoder,
        hf.ViTPooler,
    ):
        assert parameters(cls.__init__)[0] == "config"


def test_state_dict_names_are_the_librarys_file_names(tmp_path):
    transformers = peer("transformers")
    from safetensors.torch import load_file

    theirs = {name: value for name, value in TINY.items() if name != "num_labels"}
    config = transformers.ViTConfig(**theirs, num_labels=5)
    for name in ("ViTForImageClassification", "ViTModel"):
        getattr(transformers, name)(config).save_pretrained(tmp_path / name)
        file = load_file(tmp_path / name / "model.safetensors")
        ours = getattr(hf, name)(tiny())
        assert {k: v.shape for k, v in file.items()} == {k: v.shape for k, v in ours.state_dict().items()}
        ours.load_state_dict(file, strict=True)


def test_a_real_hub_file_loads_strictly(shared_data):
    file = torch.load(
        shared_data / "weights" / "vit_tiny_patch16_224.hf_keys.tinyimagenet200_finetune.pth", weights_only=True
    )
    config = hf.ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768, num_labels=200)
    model = hf.ViTForImageClassification(config).eval()
    model.load_state_dict(file, strict=True)
    with torch.no_grad():
        assert model(images(1, 3, 224, 224)).logits.std() > 0.1


def test_the_parts_have_the_known_attributes_and_results():
    config, z = tiny(chunk_size_feed_forward=5), torch.randn(2, T, D)
    attention, layer = hf.ViTSelfAttention(config), hf.ViTLayer(config)
    assert (attention.num_attention_heads, attention.attention_head_size, attention.all_head_size) == (4, 8, 32)
    assert (layer.chunk_size_feed_forward, layer.seq_len_dim) == (5, 1)
    assert isinstance(layer.layernorm_before, nn.LayerNorm)
    assert isinstance(layer.layernorm_after, nn.LayerNorm)
    for part in (attention, hf.ViTAttention(config), layer):
        assert [tuple(t.shape) for t in part(z)] == [(2, T, D)]
        assert [tuple(t.shape) for t in part(z, output_attentions=True)] == [(2, T, D), (2, H, T, T)]
    assert hf.PatchEmbeddings(32, 8, 3, D)(images()).shape == (2, 16, D)
    assert hf.ViTEmbeddings(config)(images()).shape == (2, T, D)
    assert hf.ViTIntermediate(config)(z).shape == (2, T, 64)
    output, inner = hf.ViTOutput(config), torch.randn(2, T, 64)
    torch.testing.assert_close(output(inner, z), output.dense(inner) + z)
    of_msa = hf.ViTSelfOutput(config)
    torch.testing.assert_close(of_msa(z, z), of_msa.dense(z))  # no residual here: it is the layer's
    pooler = hf.ViTPooler(config)
    torch.testing.assert_close(pooler(z), torch.tanh(pooler.dense(z[:, 0])))


def test_outputs_by_name_by_index_and_as_a_tuple():
    model = hf.ViTModel(tiny()).eval()
    x = images()
    out = model(x, output_attentions=True, output_hidden_states=True)
    assert out[0] is out.last_hidden_state is out["last_hidden_state"]
    assert out[1] is out.pooler_output
    assert out[2] is out.hidden_states
    assert out[3] is out.attentions
    assert len(out) == 4
    tokens, pooled, states, attentions = out
    assert (tokens.shape, pooled.shape, len(states), len(attentions)) == ((2, T, D), (2, D), L + 1, L)
    torch.testing.assert_close(tokens, model.layernorm(states[-1]))
    torch.testing.assert_close(pooled, torch.tanh(model.pooler.dense(tokens[:, 0])))
    torch.testing.assert_close(attentions[0].sum(-1), torch.ones(2, H, T))
    plain = model(x, output_attentions=True, output_hidden_states=True, return_dict=False)
    assert type(plain) is tuple
    assert len(plain) == 4
    torch.testing.assert_close(plain[1], pooled)
    bare = hf.ViTModel(tiny(), add_pooling_layer=False)(x)
    assert bare.pooler_output is bare.hidden_states is bare.attentions is None
    assert len(bare) == len(bare.to_tuple()) == 1
    without = hf.ViTModel(tiny(), add_pooling_layer=False)(x, output_hidden_states=True, return_dict=False)
    assert len(without) == 2
    assert isinstance(without[1], tuple)
    assert hf.ViTModel(tiny()).encoder(tokens, return_dict=False)[0].shape == (2, T, D)


@pytest.mark.parametrize(
    ("labels", "num_labels", "loss"),
    [
        (torch.tensor([1, 4]), 5, lambda z, y: F.cross_entropy(z, y)),
        (torch.tensor([1, 4], dtype=torch.int32), 5, lambda z, y: F.cross_entropy(z, y.long())),
        (torch.rand(2, 5).round(), 5, lambda z, y: F.binary_cross_entropy_with_logits(z, y)),
        (torch.tensor([0.5, -2.0]), 1, lambda z, y: F.mse_loss(z[:, 0], y)),
        (torch.tensor([[3], [1]]), 1, lambda z, y: F.mse_loss(z, y.float())),
    ],
)
def test_the_loss_follows_the_labels(labels, num_labels, loss):
    model = hf.ViTForImageClassification(tiny(num_labels=num_labels)).eval()
    out = model(images(), labels=labels)
    torch.testing.assert_close(out.loss, loss(out.logits, labels))
    assert out[0] is out.loss
    assert out[1] is out.logits
    assert model(images())[0].shape == (2, num_labels)
    plain = model(images(), labels=labels, return_dict=False)
    assert [t.dim() for t in plain] == [0, 2]


def test_a_model_without_labels_returns_the_class_token():
    model = hf.ViTForImageClassification(tiny(num_labels=0)).eval()
    x = images()
    torch.testing.assert_close(model(x).logits, model.vit(x).last_hidden_state[:, 0])


@pytest.mark.parametrize("mask", [torch.tensor([1.0, 0, 1, 0.5]), torch.tensor([[1.0, 0, 1, 0.5], [0, 1, 0, 1]])])
def test_head_masks_multiply_the_attention(mask):
    model = hf.ViTModel(tiny()).eval()
    x = images()
    out, free = model(x, head_mask=mask, output_attentions=True), model(x, output_attentions=True)
    first = mask.expand(L, H)[0].view(H, 1, 1)
    torch.testing.assert_close(out.attentions[0], free.attentions[0] * first)
    assert (out.last_hidden_state - free.last_hidden_state).abs().max() > 0.01
    ones = model(x, head_mask=torch.ones(L, H))
    torch.testing.assert_close(ones.last_hidden_state, free.last_hidden_state)


def test_a_layer_takes_the_librarys_own_mask_shape():
    layer, z, mask = hf.ViTLayer(tiny()).eval(), torch.randn(2, T, D), torch.tensor([1.0, 0, 1, 0])
    torch.testing.assert_close(layer(z, mask)[0], layer(z, mask.view(1, H, 1, 1))[0])


def test_pruning_equals_masking_and_survives_a_new_build():
    model, x = hf.ViTForImageClassification(tiny()).eval(), images()
    mask = torch.tensor([[1.0, 0, 1, 0], [0, 1, 1, 1]])
    masked = model(x, head_mask=mask).logits
    before = sum(p.numel() for p in model.parameters())
    model.prune_heads({0: [1], 1: {0}})
    model.prune_heads({0: [1, 3]})
    assert model.config.pruned_heads == ((0, (1, 3)), (1, (0,)))
    assert before - sum(p.numel() for p in model.parameters()) == 3 * (4 * 8 * D + 3 * 8)
    torch.testing.assert_close(model(x).logits, masked, rtol=0, atol=1e-5)
    attention = model.vit.encoder.layer[0].attention
    assert attention.pruned_heads == {1, 3}
    assert (attention.attention.num_attention_heads, attention.attention.all_head_size) == (2, 16)
    again = hf.ViTForImageClassification(model.config).eval()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x).logits, masked, rtol=0, atol=1e-5)
    torch.testing.assert_close(again(x, head_mask=mask).logits, masked, rtol=0, atol=1e-5)
    out = again(x, output_attentions=True)
    assert [A.shape[1] for A in out.attentions] == [2, 3]
    model.vit._prune_heads({1: [2]})
    assert model.config.pruned_heads[1] == (1, (0, 2))
    assert all(p.requires_grad for p in model.parameters())


def test_refused_pruning_changes_nothing():
    model, x = hf.ViTModel(tiny()).eval(), images()
    before = model(x).last_hidden_state
    for heads in ({0: [1], 1: [0, 1, 2, 3]}, {0: [4]}, {2: [0]}, {0: [-1]}):
        with pytest.raises(ConfigError, match="pruned_heads"):
            model.prune_heads(heads)
    torch.testing.assert_close(model(x).last_hidden_state, before, rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"no heads \[7\]"):
        model.encoder.layer[0].attention.prune_heads({7})
    with pytest.raises(ConfigError, match="keep at least one"):
        model.encoder.layer[0].attention.prune_heads(range(4))


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 20))
def test_feed_forward_chunks_of_any_size_change_nothing(size):
    torch.manual_seed(1)
    model, x = hf.ViTModel(tiny()).eval().double(), images().double()  # fp32 rounds products of chunks differently
    whole = model(x).last_hidden_state
    widths = []
    model.encoder.layer[0].intermediate.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    for layer in model.encoder.layer:
        layer.chunk_size_feed_forward = size
    torch.testing.assert_close(model(x).last_hidden_state, whole, rtol=0, atol=1e-12)
    assert max(widths) == min(size, T)
    assert sum(widths) == T


def test_masked_patches_become_the_mask_token():
    model = hf.ViTModel(tiny(), use_mask_token=True).eval()
    nn.init.normal_(model.embeddings.mask_token)
    x, mask = images(), torch.zeros(2, 16, dtype=torch.bool)
    mask[0, 3] = mask[1, :8] = True
    z, free = model.embeddings(x, bool_masked_pos=mask), model.embeddings(x)
    torch.testing.assert_close(z[:, 1:][~mask], free[:, 1:][~mask])
    expected = (model.embeddings.mask_token + model.embeddings.position_embeddings[:, 1:]).expand(2, -1, -1)
    torch.testing.assert_close(z[:, 1:][mask], expected[mask])
    assert model(x, bool_masked_pos=mask).last_hidden_state.shape == (2, T, D)
    assert "embeddings.mask_token" in model.state_dict()


def test_other_sizes_need_to_be_asked_for():
    model = hf.ViTModel(tiny()).eval()
    with pytest.raises(InputError, match=r"32 x 32; got 40 x 48.*interpolate_pos_encoding=True"):
        model(images(1, 3, 40, 48))
    out = model(images(1, 3, 40, 48), interpolate_pos_encoding=True)
    assert out.last_hidden_state.shape == (1, 31, D)
    x = images()
    torch.testing.assert_close(model(x, interpolate_pos_encoding=True)[0], model(x)[0], rtol=0, atol=0)


def test_dropout_places_are_the_documented_ones():
    x = images()
    places = {
        "embeddings.dropout",
        *(
            f"encoder.layer.{i}.{name}"
            for i in range(L)
            for name in ("attention.attention.dropout", "attention.output.dropout", "output.dropout")
        ),
    }
    model = hf.ViTModel(tiny(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2))
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    assert set(rates) == places
    assert all(p == (0.2 if "attention.attention" in name else 0.3) for name, p in rates.items())
    assert not torch.equal(model.train()(x)[0], model(x)[0])
    torch.testing.assert_close(model.eval()(x)[0], model(x)[0], rtol=0, atol=0)


def test_initialisation():
    model = hf.ViTForImageClassification(hf.ViTConfig(num_hidden_layers=1, num_labels=100))
    for name, value in model.state_dict().items():
        if "layernorm" in name:
            assert torch.equal(value, torch.full_like(value, float(name.endswith("weight")))), name
        elif name.endswith("bias"):
            assert not value.any(), name
        else:
            assert 0.018 < value.std() < 0.022, name
            assert abs(value.mean()) < 0.004, name
    wide = hf.ViTModel(tiny(initializer_range=0.1)).encoder.layer[0].output.dense.weight
    assert 0.09 < wide.std() < 0.11


def test_gradient_checkpointing_gives_the_same_gradients():
    x, labels = images(), torch.tensor([0, 3])
    model = hf.ViTForImageClassification(tiny()).train()
    model(x, labels=labels).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.vit.encoder.gradient_checkpointing = True
    calls = []
    model.vit.encoder.layer[0].intermediate.register_forward_hook(lambda *_: calls.append(1))
    model(x, labels=labels).loss.backward()
    assert len(calls) == 2  # once forward, once again for the gradient
    assert any(g.any() for g in plain)
    for p, g in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=1e-6)


def test_the_meta_device_and_exact_parameter_counts():
    with torch.device("meta"):
        model = hf.ViTForImageClassification(hf.ViTConfig())
        base = hf.ViTModel(hf.ViTConfig(pruned_heads=((3, (0, 5)),)))
    assert sum(p.numel() for p in model.parameters()) == 86_567_656
    assert sum(p.numel() for p in base.parameters()) == 86_389_248 - 2 * (4 * 64 * 768 + 3 * 64)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_models_of_another_precision_take_float_pixels():
    model = hf.ViTModel(tiny()).eval().double()
    out = model(images(), head_mask=torch.tensor([1.0, 0, 1, 1]))
    assert out.last_hidden_state.dtype == torch.float64


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("pool", {"pool": "mean"}),
        ("class_token", {"pool": "mean", "class_token": False}),
        ("layer_scale", {"layer_scale": 1e-5}),
        ("num_register_tokens", {"num_register_tokens": 4}),
        ("drop_path_rate", {"drop_path_rate": 0.1}),
        ("pad_input", {"pad_input": True}),
    ],
)
def test_what_the_classes_cannot_express_is_refused_by_name(field, changes):
    expected = "pool" if field == "class_token" else field  # without a class token, pool already says it
    for cls in (hf.ViTModel, hf.ViTForImageClassification):
        with pytest.raises(ConfigError, match=f"no place for {expected}="):
            cls(tiny(**changes))


def test_pre_logits_are_the_pooler():
    with pytest.raises(ConfigError, match="pre_logits=True"):
        hf.ViTForImageClassification(tiny(pre_logits=True))
    assert hf.ViTModel(tiny(pre_logits=True)).pooler is not None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: hf.ViTModel({"hidden_size": 32}),
            ConfigError,
            "Expected a vitkit.huggingface.ViTConfig; got builtins",
        ),
        (lambda: hf.PatchEmbeddings(image_size=30, patch_size=16), ConfigError, "image_size=30 and patch_size=16"),
        (lambda: hf.ViTModel(tiny())(), InputError, "got None"),
        (lambda: hf.ViTModel(tiny())(images(2, 1, 32, 32)), InputError, r"\[batch, 3, .*got \[2, 1, 32, 32\]"),
        (lambda: hf.ViTModel(tiny())(images(3, 32, 32)), InputError, r"got \[3, 32, 32\]"),
        (lambda: hf.ViTModel(tiny())(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)), InputError, "uint8"),
        (
            lambda: hf.ViTModel(tiny())(images(1, 3, 33, 32), interpolate_pos_encoding=True),
            InputError,
            "patch size 8 x 8; got 33 x 32. Resize to 32 x 32",
        ),
        (lambda: hf.ViTModel(tiny())(images(), head_mask=torch.ones(3)), InputError, r"\[4\] or \[2, 4\]; got \[3\]"),
        (lambda: hf.ViTModel(tiny())(images(), bool_masked_pos=torch.ones(2, 16)), InputError, "use_mask_token=True"),
        (
            lambda: hf.ViTModel(tiny(), use_mask_token=True)(images(), bool_masked_pos=torch.ones(2, 17)),
            InputError,
            r"\[2, 16\]; got \[2, 17\]",
        ),
        (
            lambda: hf.ViTForImageClassification(tiny())(images(), labels=torch.ones(3).long()),
            InputError,
            r"shape \[2\] for logits \[2, 5\]; got \[3\]",
        ),
        (
            lambda: hf.ViTForImageClassification(tiny())(images(), labels=torch.ones(2)),
            InputError,
            r"shape \[2, 5\] .* got \[2\] of torch.float32",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
