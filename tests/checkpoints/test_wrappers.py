"""Weights inside what training scripts save, prefixes in front of names, renaming, and names that fit no dialect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import tiny
from tests.peers import peer
from vitkit.checkpoints import load, open_checkpoint, save, to_dialect
from vitkit.checkpoints.dialects import PREFIXES
from vitkit.checkpoints.verify import BAR, compare
from vitkit.errors import CannotExpress, ConfigError, TensorMismatch, UnknownDialect

Tensors = dict[str, torch.Tensor]


def tensors(seed: int = 0, dialect: str = "timm", **fields: Any) -> Tensors:
    return {name: t.clone() for name, t in to_dialect(tiny.model(seed, **fields), dialect).items()}


def is_model(path: Path, seed: int, **arguments: Any) -> bool:
    return tiny.same_tensors(load(path, num_attention_heads=4, **arguments), tiny.model(seed))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("teacher", "student"),
        ("state_dict_ema", "state_dict"),
        ("model_ema", "model"),
        ("ema", "net"),
        ("model", "student"),
    ],
)
def test_averages_and_teachers_come_first(
    first: str, second: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({second: tensors(2), first: tensors(1), "epoch": 3}, tmp_path / "a.pth")
    assert is_model(tmp_path / "a.pth", 1)
    assert f"several sets of weights ({first}, {second}); those under {first!r} are used" in caplog.text
    assert "key= (--key)" in caplog.text
    assert is_model(tmp_path / "a.pth", 2, key=second)


@pytest.mark.parametrize("key", ["model_state", "net", "student", "model_state_dict", "module", "params"])
def test_one_set_of_weights(key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({key: tensors(), "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}}, tmp_path / "a.pth")
    assert is_model(tmp_path / "a.pth", 0)
    assert f"The weights are those under {key!r} in the file" in caplog.text


def test_key(tmp_path: Path) -> None:
    torch.save({"mine": tensors(1), "yours": tensors(2)}, tmp_path / "a.pth")
    with pytest.raises(TensorMismatch, match=r"tensors under mine, yours\. Choose with key="):
        load(tmp_path / "a.pth")
    assert is_model(tmp_path / "a.pth", 2, key="yours")
    with pytest.raises(TensorMismatch, match=r"one under ours; .* holds tensors under mine, yours"):
        load(tmp_path / "a.pth", key="ours")
    torch.save(tensors(), tmp_path / "a.pth")
    with pytest.raises(TensorMismatch, match="at the top level"):
        load(tmp_path / "a.pth", key="model")


@pytest.mark.parametrize("prefix", [*PREFIXES, "module.net.", "model.encoder.", "module._orig_mod.vit."])
@pytest.mark.parametrize("dialect", ["timm", "huggingface", "torchvision"])
def test_prefixes_are_removed(prefix: str, dialect: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = {prefix + name: t for name, t in tensors(dialect=dialect).items()}
    torch.save(saved, tmp_path / "a.pth")
    assert is_model(tmp_path / "a.pth", 0)
    assert "was removed from the names" in caplog.text or (prefix, dialect) == ("backbone.", "timm")


def test_a_prefix_on_some_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A backbone inside a module with a head of its own."""
    torch.save({n if n.startswith("head") else f"net.{n}": t for n, t in tensors().items()}, tmp_path / "a.pth")
    assert is_model(tmp_path / "a.pth", 0)
    assert "The prefix 'net.' was removed" in caplog.text


def test_prefixes_in_safetensors(tmp_path: Path) -> None:
    """Pieces of our tensors are read through a mapping of their own, by the names in the file."""
    from safetensors.torch import save_file

    save_file({f"model.{n}": t for n, t in tensors(dialect="huggingface").items()}, tmp_path / "a.safetensors")
    assert is_model(tmp_path / "a.safetensors", 0)


@pytest.mark.parametrize("kind", ["IJepaModel", "IJepaForImageClassification", "DeiTForImageClassification"])
def test_relatives_in_transformers(kind: str, tmp_path: Path) -> None:
    library = peer("transformers")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = getattr(library, kind.split("For", maxsplit=1)[0].removesuffix("Model") + "Config")
    theirs = getattr(library, kind)(config(**shape, image_size=32, patch_size=8, num_labels=4)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / kind)
    model, x = load(tmp_path / kind), torch.randn(2, 3, 32, 32)
    out = theirs(x)
    expected = out.logits if "For" in kind else out.last_hidden_state.mean(1)
    assert tiny.difference(model(x), expected) <= BAR


# Renaming


OWN = ((r"^blocks", "layers"), (r"attn\.qkv", "attention.joint"), (r"^patch_embed\.proj", "stem"))


def renamed(*pairs: tuple[str, str]) -> Tensors:
    result = tensors()
    for pattern, replacement in pairs:
        result = {re.sub(pattern, replacement, name): t for name, t in result.items()}
    return result


def test_rename(tmp_path: Path) -> None:
    torch.save(renamed(*OWN), tmp_path / "a.pth")
    with pytest.raises(UnknownDialect, match=r"rename its tensors \(rename=, --rename\)"):
        load(tmp_path / "a.pth")
    table = {r"^layers\.": "blocks.", r"attention\.joint": "attn.qkv", r"^stem": "patch_embed.proj"}
    assert is_model(tmp_path / "a.pth", 0, rename=table)
    peer("timm")
    assert all(row.equal for row in compare(tmp_path / "a.pth", rename=table, num_attention_heads=4))


def test_rename_on_the_command_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from vitkit.cli import app

    torch.save(renamed(*OWN) | {"extra.weight": torch.zeros(1)}, tmp_path / "a.pth")
    table = (r"^layers\.=blocks.", "attention.joint=attn.qkv", "^stem=patch_embed.proj", "^extra.*")
    arguments = [word for pair in table for word in ("--rename", pair)]
    done = CliRunner().invoke(
        app, ["convert", str(tmp_path / "a.pth"), str(tmp_path / "b.safetensors"), "--heads", "4", *arguments]
    )
    assert done.exit_code == 0, done.output
    assert tiny.same_tensors(load(tmp_path / "b.safetensors"), tiny.model())


def test_rename_can_leave_tensors_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({**tensors(), "projector.0.weight": torch.zeros(2, 2)}, tmp_path / "a.pth")
    with pytest.raises(TensorMismatch, match=r"holds 1 others: 'projector\.0\.weight'") as error:
        load(tmp_path / "a.pth")
    assert "Remove" not in str(error.value)
    assert is_model(tmp_path / "a.pth", 0, rename={r"^projector\..*": ""})
    assert "rename leaves out 1 tensors: 'projector.0.weight'" in caplog.text


def test_a_rename_must_be_valid_and_used(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "a.pth")
    with pytest.raises(ConfigError, match=r"regular expressions; '\(' is not valid"):
        load(tmp_path / "a.pth", rename={"(": ""})
    with pytest.raises(ConfigError, match="none of them contains 'nothing'"):
        load(tmp_path / "a.pth", rename={"nothing": "x"})


# Names that fit no dialect


def test_the_names_that_do_not_fit_are_shown(tmp_path: Path) -> None:
    """The first names of the file are valid ones, and do not help."""
    save(tiny.model(), tmp_path, "huggingface")
    odd = {
        name.replace("layernorm_before", "ln_a").replace("layernorm_after", "ln_b"): t
        for name, t in tensors(dialect="huggingface").items()
    }
    (tmp_path / "model.safetensors").unlink()
    torch.save(odd, tmp_path / "pytorch_model.bin")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "vit_own"}), encoding="utf-8")
    with pytest.raises(UnknownDialect) as error:
        load(tmp_path)
    said = str(error.value)
    assert "In huggingface, the closest, 'vit.encoder.layer.0.ln_a.weight'" in said
    assert "and 4 more do not fit" in said
    assert "(config.json: model_type 'vit_own')" in said
    assert "cls_token" not in said


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ("blocks.0.attns.0.norm.weight", "parallel branches"),
        ("blocks.0.attn.lambda_q1", "differential attention"),
    ],
)
def test_architectures_behind_unknown_names(extra: str, what: str, tmp_path: Path) -> None:
    torch.save({"patch_embed.proj.weight": torch.zeros(4, 3, 2, 2), extra: torch.zeros(4)}, tmp_path / "a.pth")
    with pytest.raises(CannotExpress, match=what):
        load(tmp_path / "a.pth")


@pytest.mark.parametrize("place", ["", "encoder.", "transformer_encoder."])
def test_torch_encoders_are_refused_with_the_reason(place: str, tmp_path: Path) -> None:
    """norm_first changes the outputs and leaves no trace in the file."""
    for norm_first in (False, True):
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
        encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        own = {"patch_embedding.patcher.weight": torch.zeros(32, 3, 8, 8), "class_embedding": torch.zeros(1, 1, 32)}
        torch.save(own | {f"{place}{n}": t for n, t in encoder.state_dict().items()}, tmp_path / "a.pth")
        with pytest.raises(CannotExpress, match=r"do not tell pre-norm from post-norm.*norm_first=True"):
            load(tmp_path / "a.pth")


def test_other_models_with_the_usual_names_are_diagnosed(tmp_path: Path) -> None:
    """Each would otherwise be called incomplete, or a mismatch between the file and its configuration."""
    plain = tensors(num_classes=0)
    swiglu = plain | {f"blocks.{i}.mlp.fc2.weight": torch.zeros(32, 32) for i in range(2)}
    rms = {name: t for name, t in plain.items() if not re.search(r"norm\d?\.bias", name)}
    no_norm = {name: t for name, t in plain.items() if not name.startswith("norm.")}
    no_positions = {name: t for name, t in plain.items() if name != "pos_embed"}
    for saved, what in (
        (swiglu, r"SwiGLU.*'blocks\.0\.mlp\.fc1\.weight'"),
        (rms, "RMSNorm"),
        (no_norm, "no LayerNorm after the last block"),
        (no_positions, "rotary, relative or fixed"),
    ):
        torch.save(saved, tmp_path / "a.pth")
        with pytest.raises((CannotExpress, TensorMismatch), match=what):
            load(tmp_path / "a.pth", num_attention_heads=4)
    keyless = {n: t for n, t in tensors(dialect="huggingface").items() if not n.endswith("key.bias")}
    torch.save(keyless, tmp_path / "a.pth")
    assert load(tmp_path / "a.pth", num_attention_heads=4).config.without_bias == ("keys",)  # as in BEiT
    one_missing = {
        n: t
        for n, t in tensors(dialect="huggingface").items()
        if not n.endswith("layer.1.attention.attention.key.bias")
    }
    torch.save(one_missing, tmp_path / "a.pth")
    with pytest.raises(TensorMismatch, match="it is incomplete"):
        load(tmp_path / "a.pth", num_attention_heads=4)


def test_notes_name_the_source_of_a_wrapped_file(tmp_path: Path) -> None:
    torch.save({"state_dict": {f"module.{n}": t for n, t in tensors().items()}}, tmp_path / "a.pth")
    notes = open_checkpoint(tmp_path / "a.pth", num_attention_heads=4).notes
    assert notes[0] == "The weights are those under 'state_dict' in the file."
    assert notes[1] == "The prefix 'module.' was removed from the names of the tensors."
