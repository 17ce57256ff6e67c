"""Every ordered pair of dialects: what both can express arrives bit for bit; what one cannot is refused by name."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import vitkit
from tests.checkpoints import tiny
from vitkit.checkpoints import DIALECTS, convert, from_dialect, load, save, sidecar, to_dialect
from vitkit.checkpoints.capabilities import ALL, PROPERTIES, can_express, cannot
from vitkit.errors import CannotExpress, ConfigError
from vitkit.model.config import InputSpec, ViTConfig


def test_the_table_covers_every_dialect_and_property() -> None:
    assert ALL.split() == list(DIALECTS)
    assert all(set(dialects.split()) <= set(DIALECTS) for _, dialects in PROPERTIES.values())
    assert all(can_express(name, "native") for name in PROPERTIES)


@st.composite
def configs(draw: st.DrawFn) -> ViTConfig:
    heads, head_size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 5, 8]))
    width, patch = heads * head_size, draw(st.sampled_from([1, 2, 4]))
    class_token = draw(st.booleans())
    pool = draw(st.sampled_from(["cls", "mean"])) if class_token else "mean"
    square = draw(st.booleans())
    rows = draw(st.integers(1, 5))
    columns = rows if square else draw(st.integers(1, 5))
    classes = draw(st.sampled_from([0, 1, 3, 7]))
    registers = draw(st.sampled_from([0, 0, 1, 3]))
    try:
        return ViTConfig(
            hidden_size=width,
            num_attention_heads=heads,
            num_hidden_layers=draw(st.integers(1, 3)),
            intermediate_size=draw(st.sampled_from([width, 2 * width, 2 * width + 1])),
            patch_size=patch,
            image_size=(rows * patch, columns * patch),
            num_channels=draw(st.sampled_from([1, 3, 4])),
            num_classes=classes,
            qkv_bias=draw(st.booleans()),
            class_token=class_token,
            pool=pool,
            norm_after_pool=draw(st.booleans()) and pool == "mean",
            pre_logits=draw(st.booleans()),
            layer_scale=draw(st.sampled_from([None, 0.5])),
            num_register_tokens=registers,
            prefix_positions=draw(st.booleans()) or not (class_token or registers),
            layer_norm_eps=draw(st.sampled_from([1e-12, 1e-6, 1e-5])),
            hidden_act=draw(st.sampled_from(["gelu", "gelu_tanh"])),
            position_resize=draw(st.sampled_from(["google", "timm", "huggingface", "dinov2"])),
        )
    except ConfigError as error:  # the strategy is wrong, not the code
        raise AssertionError(error) from error


@settings(deadline=None, max_examples=40)
@given(config=configs(), seed=st.integers(0, 1000))
def test_tensors_of_any_model_and_every_pair(config: ViTConfig, seed: int) -> None:
    model = tiny.model(seed, **{name: getattr(config, name) for name in ViTConfig.__dataclass_fields__})
    assert "native" in tiny.expressible(config)
    for source, target in itertools.permutations(DIALECTS, 2):
        if cannot(config, source):
            continue
        between = tiny.through(model, source).config
        through = vitkit.ViT(between)
        through.load_state_dict(from_dialect(to_dialect(model, source), source, between))
        if missing := cannot(config, target):
            with pytest.raises(CannotExpress, match=re.escape(missing[0])):
                to_dialect(through, target)
            continue
        arrives = tiny.through(model, source, target)
        back, state = from_dialect(to_dialect(through, target), target, arrives.config), arrives.state_dict()
        assert set(back) == set(state)
        assert all(torch.equal(back[name], state[name]) for name in state), (source, target)


@settings(deadline=None, max_examples=50)
@given(config=configs(), data=st.data())
def test_files_of_any_model(config: ViTConfig, data: st.DataObject) -> None:
    """Through real files the numerics, the preprocessing and the class names arrive too."""
    model = tiny.model(3, **{name: getattr(config, name) for name in ViTConfig.__dataclass_fields__})
    C, K = config.num_channels, config.num_classes
    model.input_spec = InputSpec(
        size=config.image_hw,
        mean=(0.1,) * C,
        std=(0.3,) * C,
        resize="crop",
        channels={1: "gray", 3: "rgb", 4: "raw"}[C],
        crop=data.draw(st.sampled_from([0.9, 0.875, 1.0])),
        interpolation="bicubic",
        class_names=tuple(f"class {i}" for i in range(K)),
    )
    first, second = (data.draw(st.sampled_from(tiny.expressible(config))) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        a, b = (Path(folder) / tiny.destination(dialect, stem) for dialect, stem in ((first, "a"), (second, "b")))
        save(model, a, first)
        convert(a, b, second)
        found, arrives = load(b), tiny.through(model, first, second)
    assert tiny.same_tensors(found, arrives)
    assert found.config == arrives.config
    assert found.input_spec == model.input_spec


PAIRS = list(itertools.permutations(DIALECTS, 2))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{a}-to-{b}" for a, b in PAIRS])
def test_files_of_every_pair(source: str, target: str, tmp_path: Path) -> None:
    """Both ways through files, for a model that both can express if there is one among ours."""
    shared = [
        fields
        for fields in tiny.MODELS.values()
        if not cannot(tiny.config(**fields), source) and not cannot(tiny.config(**fields), target)
    ]
    if not shared:
        model = tiny.model(**next(f for f in tiny.MODELS.values() if not cannot(tiny.config(**f), source)))
        there = save(model, tmp_path / tiny.destination(source), source)
        with pytest.raises(CannotExpress, match=re.escape(cannot(model.config, target)[0])):
            convert(there, tmp_path / "out" / tiny.destination(target), target)
        assert not (tmp_path / "out").exists()
        return
    for number, fields in enumerate(shared):
        model = tiny.model(number, **fields)
        x = tiny.pixels(model)
        save(model, tmp_path / tiny.destination(source, f"a{number}"), source)
        convert(
            tmp_path / tiny.destination(source, f"a{number}"), tmp_path / tiny.destination(target, f"b{number}"), target
        )
        found = load(tmp_path / tiny.destination(target, f"b{number}"))
        arrives = tiny.through(model, source, target)
        assert tiny.same_tensors(found, arrives)
        assert found.config == arrives.config
        assert torch.equal(found(x), model(x))


def test_some_pairs_share_a_model() -> None:
    """The test above cannot pass by refusing everything."""
    both = [
        (a, b)
        for a, b in PAIRS
        if any(not cannot(tiny.config(**f), a) and not cannot(tiny.config(**f), b) for f in tiny.MODELS.values())
    ]
    plain = ("huggingface", "timm", "torchvision", "google", "course")
    alone = {
        ("dinov2", "torchvision"),
        ("dinov2", "course"),
        *(("dinov2-hf", name) for name in plain if name != "timm"),
    }
    families = {"clip": "clip-hf", "dinov3": "dinov3-hf"}  # each family's two dialects share its models, and native all
    assert {pair for pair in PAIRS if pair not in both} >= {*alone, *((b, a) for a, b in alone)}
    assert set(families.items()) <= set(both)
    assert {("native", name) for name in DIALECTS if name != "native"} <= set(both)
    assert {(a, b) for a, b in itertools.permutations(plain, 2)} <= set(both)


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if can_express("pruned heads", name)])
def test_pruned_heads(dialect: str, tmp_path: Path) -> None:
    model = tiny.model()
    model.prune_heads({0: [1, 2], 1: [0]})
    save(model, tmp_path / tiny.destination(dialect), dialect)
    found = load(tmp_path / tiny.destination(dialect))
    assert found.config.pruned_heads == ((0, (1, 2)), (1, (0,)))
    assert torch.equal(found(tiny.pixels(model)), model(tiny.pixels(model)))


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if not can_express("pruned heads", name)])
def test_pruned_heads_refused(dialect: str) -> None:
    model = tiny.model(num_classes=0, layer_scale=0.5) if dialect.startswith("dinov2") else tiny.model()
    model.prune_heads({0: [1]})
    with pytest.raises(CannotExpress, match="pruned heads"):
        to_dialect(model, dialect)


def test_equal_models_give_equal_files(tmp_path: Path) -> None:
    """Two processes write the same bytes; a random order of safetensors' metadata would show in a few files."""
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.checkpoints import tiny\nfrom vitkit.checkpoints import save\n"
        "folder = Path(sys.argv[1])\n"
        "for dialect in ('native', 'huggingface', 'timm', 'google'):\n"
        "    save(tiny.model(), folder / tiny.destination(dialect, dialect), dialect)\n"
        "for seed in range(5):\n"
        "    save(tiny.model(seed), folder / f'{seed}.safetensors', extra={'run': '7', 'accuracy': '0.9'})\n"
        "    save(tiny.model(seed), folder / f'{seed}-timm.safetensors', 'timm')"
    )
    written = []
    for name in ("a", "b"):
        subprocess.run([sys.executable, "-c", code, tmp_path / name], check=True, cwd=Path(__file__).parents[2])
        files = sorted(file for file in (tmp_path / name).rglob("*") if file.is_file())
        written.append({str(file.relative_to(tmp_path / name)): file.read_bytes() for file in files})
    assert len(written[0]) == 23
    assert written[0] == written[1]


def test_native_files_with_two_metadata_keys_are_still_read(tmp_path: Path) -> None:
    """Earlier versions wrote `format` next to `vitkit`."""
    model = tiny.model(layer_norm_eps=1e-3)
    text = sidecar.describe(model.config, model.input_spec, extra={"run": "7"})
    save_file(dict(model.state_dict()), tmp_path / "a.safetensors", {"format": "pt", "vitkit": text})
    assert load(tmp_path / "a.safetensors").config == model.config


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    model = tiny.model().to(torch.bfloat16)
    for dialect in ("native", "huggingface", "timm", "torchvision", "course"):
        save(model, tmp_path / tiny.destination(dialect, dialect), dialect)
        found = load(tmp_path / tiny.destination(dialect, dialect))
        assert next(found.parameters()).dtype == torch.bfloat16
        assert tiny.same_tensors(found, model)
    save(model, tmp_path / "b.npz", "google")  # NumPy has no bfloat16: float32 holds the same numbers
    assert tiny.same_tensors(load(tmp_path / "b.npz", dtype="bfloat16"), model)
