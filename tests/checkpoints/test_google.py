"""The forms in which the authors' files come; timm's own reader is the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import tiny
from tests.peers import peer
from vitkit.checkpoints import load, save, to_dialect

Arrays = dict[str, np.ndarray]


def arrays(model: Any) -> Arrays:
    return {name: tensor.detach().numpy() for name, tensor in to_dialect(model, "google").items()}


def big_vision(model: Any, prefix: str = "params/", stacked: bool = False) -> Arrays:
    """The same model as big_vision keeps it; its class token has no position of its own."""
    result = {}
    for name, array in arrays(model).items():
        for old, new in (
            ("MultiHeadDotProductAttention_1", "MultiHeadDotProductAttention_0"),
            ("LayerNorm_2", "LayerNorm_1"),
            ("MlpBlock_3", "MlpBlock_0"),
            ("Transformer/posembed_input/pos_embedding", "pos_embedding"),
        ):
            name = name.replace(old, new)
        result[prefix + name] = array
    if model.config.class_token:
        positions = result[f"{prefix}pos_embedding"]
        result[f"{prefix}cls"] = result[f"{prefix}cls"] + positions[:, :1]
        result[f"{prefix}pos_embedding"] = positions[:, 1:]
    if stacked:
        names = [name for name in result if "encoderblock_0/" in name]
        depth = model.config.num_hidden_layers
        for name in names:
            parts = [result.pop(name.replace("encoderblock_0/", f"encoderblock_{i}/")) for i in range(depth)]
            result[name.replace("encoderblock_0/", "encoderblock/")] = np.stack(parts)
    return result


def timm_model(model: Any, **more: Any) -> Any:
    c = model.config
    pool = "token" if c.pool == "cls" else "avg"
    return (
        peer("timm")
        .models.VisionTransformer(
            img_size=c.image_hw,
            patch_size=c.patch_size,
            embed_dim=c.hidden_size,
            depth=c.num_hidden_layers,
            num_heads=c.num_attention_heads,
            mlp_ratio=c.intermediate_size / c.hidden_size,
            num_classes=c.num_classes,
            act_layer="gelu_tanh",
            class_token=c.class_token,
            global_pool=pool,
            fc_norm=False,
            **more,
        )
        .eval()
    )


TANH = {"layer_norm_eps": 1e-6, "hidden_act": "gelu_tanh"}


@pytest.mark.parametrize("form", ["original", "opt/target", "big_vision", "params/img", "stacked", "gap"])
def test_forms(form: str, tmp_path: Path) -> None:
    model = tiny.model(**TANH, **({"class_token": False, "pool": "mean"} if form == "gap" else {}))
    made: Arrays = {
        "original": lambda: arrays(model),
        "opt/target": lambda: {f"opt/target/{name}": a for name, a in arrays(model).items()},
        "big_vision": lambda: big_vision(model),
        "params/img": lambda: big_vision(model, "params/img/"),
        "stacked": lambda: big_vision(model, stacked=True),
        "gap": lambda: big_vision(model),
    }[form]()
    np.savez(tmp_path / "a.npz", **made)
    found, x = load(tmp_path / "a.npz"), tiny.pixels(model)
    assert found.config.num_attention_heads == 4  # from the shape of the kernels: no variant is so narrow
    assert found.config.hidden_act == "gelu_tanh"
    assert tiny.difference(found(x), model(x)) < 5e-6
    theirs = timm_model(model, **({"no_embed_class": True} if form in ("big_vision", "params/img", "stacked") else {}))
    theirs.load_pretrained(str(tmp_path / "a.npz"))
    assert tiny.difference(found(x), theirs(x)) < 5e-6


def test_optimiser_state_is_named_as_unused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = {f"opt/target/{name}": a for name, a in arrays(tiny.model()).items()}
    np.savez(tmp_path / "a.npz", **made, **{"opt/state/step": np.zeros(1)})
    load(tmp_path / "a.npz")
    assert "Left out of the model: the optimizer's state (1 tensor)." in caplog.text


def test_bfloat16_bytes_of_jax(tmp_path: Path) -> None:
    model = tiny.model(**TANH).to(torch.bfloat16)
    made = {
        name: tensor.contiguous().view(torch.uint16).numpy().view("V2")
        for name, tensor in to_dialect(model, "google").items()
    }
    np.savez(tmp_path / "a.npz", **made)
    assert tiny.same_tensors(load(tmp_path / "a.npz"), model)


@pytest.mark.parametrize("fields", [{}, {"class_token": False, "pool": "mean"}], ids=["token", "gap"])
def test_timm_reads_what_we_write(fields: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.model(**TANH, **fields)
    save(model, tmp_path / "a.npz", "google")
    theirs, x = timm_model(model), tiny.pixels(model)
    theirs.load_pretrained(str(tmp_path / "a.npz"))
    assert tiny.difference(model(x), theirs(x)) < 5e-6
