"""ResNets: exact counts, the libraries' logits, the three numerics, both bottlenecks, names and files."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import vitkit
from tests.peers import peer
from vitkit.checkpoints import DIALECTS, convert, inspect, load, save
from vitkit.checkpoints.resnets import RESNET_DIALECTS
from vitkit.checkpoints.verify import compare
from vitkit.errors import CannotExpress, ConfigError, InputError, TensorMismatch, UnknownName
from vitkit.model.config import variant
from vitkit.model.count import flops, parameters
from vitkit.model.resnet import HybridStem, ResNet, StdConv
from vitkit.model.resnet_config import RESNETS, ResNetConfig, resnet_name

# At 224 px with 1000 classes: (parameters, multiply-adds x 2).
COUNTS = {
    "r50x1": (25_549_352, 8_178_368_512),
    "r50x2": (97_988_712, 32_233_226_240),
    "r50x3": (217_319_080, 72_164_573_184),
    "r101x1": (44_541_480, 15_602_810_880),
    "r101x3": (387_934_888, 138_984_554_496),
    "r152x1": (60_185_128, 23_027_253_248),
    "r152x2": (236_335_208, 91_628_765_184),
    "r152x4": (936_533_224, 365_554_565_120),
    "r200x3": (568_633_000, 268_693_929_984),
}
SMALL = ResNetConfig(
    depths=(1, 2, 1, 1), hidden_sizes=(128, 128, 256, 256), embedding_size=32, image_size=64, num_classes=5
)


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every weight a random value, so that a tensor in the wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3, generator=generator)
            if ("gn" in name or "norm" in name) and name.endswith("weight"):
                parameter.add_(1.0)
    return model.eval()


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(((ours - theirs).abs().max() / ours.abs().max()).detach())


def test_every_resnet_has_its_counts() -> None:
    assert set(COUNTS) == set(RESNETS)


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    with torch.device("meta"):
        model = vitkit.create(name)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model.eval()(torch.empty(1, 3, 224, 224))
    assert (parameters(RESNETS[name]), flops(RESNETS[name])) == COUNTS[name]
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name][0]
    assert counter.get_total_flops() == COUNTS[name][1]


def test_counts_of_other_sizes() -> None:
    c = ResNetConfig(
        depths=(2, 1), hidden_sizes=(32, 64), embedding_size=8, num_groups=8, image_size=(37, 50), num_channels=1
    )
    model = ResNet(c).eval()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(pixels(1, 1, 37, 50))
    assert sum(p.numel() for p in model.parameters()) == parameters(c)
    assert counter.get_total_flops() == flops(c)


@pytest.mark.parametrize("name", ["50x1", "50x3", "101x1", "101x3", "152x2", "152x4"])
def test_counts_are_those_of_timm(name: str) -> None:
    with torch.device("meta"):
        theirs = peer("timm").create_model(f"resnetv2_{name}_bit")
    assert sum(p.numel() for p in theirs.parameters()) == COUNTS[f"r{name}"][0]
    assert resnet_name(f"resnetv2_{name}_bit") == f"r{name}"


@pytest.mark.parametrize("spelling", ["r50x1", "R50x1", "BiT-R50x1", "BiT-M-R50x1", "resnetv2_50x1_bit"])
def test_spellings(spelling: str) -> None:
    with torch.device("meta"):
        assert vitkit.create(spelling).config == RESNETS["r50x1"]


def test_unknown_names_and_fields_are_refused() -> None:
    with pytest.raises(UnknownName, match="r50x1"):
        vitkit.create("r50x7")
    with pytest.raises(ConfigError, match="A ResNet has no field 'pool'"):
        vitkit.create("r50x1", pool="cls")
    with pytest.raises(ConfigError, match="'r50x1' is a ResNet"):
        variant("r50x1")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"depths": (1,)}, "depths and hidden_sizes must have one number per stage each; got 1 and 4"),
        ({"depths": ()}, "depths must be one to 4 whole numbers"),
        ({"hidden_sizes": (100, 512, 1024, 2048)}, "hidden_sizes must be a multiple of 128, for 32 groups; got 100"),
        ({"embedding_size": 50}, "embedding_size must be a multiple of 32"),
        ({"standardisation": "torch"}, "standardisation must be one of bit, google, timm"),
        ({"num_classes": -1}, "num_classes must be a whole number"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ResNetConfig(**fields)


def test_configurations_travel_through_dictionaries() -> None:
    assert ResNetConfig.from_dict(SMALL.to_dict()) == SMALL
    with pytest.raises(ConfigError, match="no field 'depth', did you mean 'depths'"):
        ResNetConfig.from_dict({"depth": [1]})


@pytest.mark.parametrize("name", ["bit", "google", "timm"])
def test_standardised_kernels_by_hand(name: str) -> None:
    conv = filled(StdConv(3, 4, 3, 1, name, same=False))
    with torch.no_grad():
        conv.weight.mul_(1e-3)  # small, so that the epsilons show
        w = conv.weight.double()
        w = w - w.mean((1, 2, 3), keepdim=True)
        variance = w.square().mean((1, 2, 3), keepdim=True)
        by = {"bit": (variance + 1e-10).sqrt(), "google": variance.sqrt() + 1e-5, "timm": (variance + 1e-8).sqrt()}
        x = pixels(1, 3, 5, 5)
        expected = nn.functional.conv2d(x.double(), w / by[name], padding=1)
        assert difference(expected, conv(x).double()) < 1e-6
        for other in set(by) - {name}:
            assert difference(expected, nn.functional.conv2d(x.double(), w / by[other], padding=1)) > 1e-5


def test_the_numerics_differ_in_epsilon_too() -> None:
    assert [ResNet(ResNetConfig(standardisation=name, depths=(1,), hidden_sizes=(128,))).norm.eps
            for name in ("bit", "google", "timm")] == [1e-5, 1e-6, 1e-5]  # fmt: skip


@pytest.mark.parametrize("size", [(64, 64), (65, 50)])
@torch.no_grad()
def test_logits_of_timm_and_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    """The original libraries read files that we wrote; odd sizes show where padding goes."""
    model = filled(ResNet(SMALL))
    x = pixels(2, 3, *size)
    for dialect in ("timm", "google", "huggingface"):
        path = tmp_path / f"model{RESNET_DIALECTS[dialect].suffixes[0]}"
        save(model, path, dialect)
        rows = compare(path, photos=x, standardisation="timm")
        assert len(rows) == 2
        assert all(row.equal for row in rows), rows
        assert all(row.library == ("transformers" if dialect == "huggingface" else "timm") for row in rows)


@torch.no_grad()
def test_logits_of_a_real_size(tmp_path: Path) -> None:
    timm = peer("timm")
    torch.manual_seed(0)
    theirs = timm.create_model("resnetv2_50x1_bit", num_classes=10).eval()
    torch.save(theirs.state_dict(), tmp_path / "resnetv2_50x1_bit.pth")
    ours, x = load(tmp_path / "resnetv2_50x1_bit.pth"), pixels(1, 3, 96, 96)
    assert inspect(tmp_path / "resnetv2_50x1_bit.pth")["variant"] == "r50x1"
    assert difference(ours(x), theirs(x)) < 5e-6
    assert ours.features(x).shape == (1, 2048)
    assert difference(ours.classify(ours.features(x)), theirs(x)) < 5e-6


@pytest.mark.parametrize("depths", [(), (1, 1, 1), (1, 2, 1, 1)])
@torch.no_grad()
def test_the_stem_of_hybrids_is_timms(depths: tuple[int, ...]) -> None:
    """Post-activation units and SAME padding, at sides that are multiples of what the stem halves."""
    hybrid = peer("timm.models.vision_transformer_hybrid")
    ours, theirs = filled(HybridStem(depths, 3, "timm")), hybrid._resnetv2(depths).eval()
    names = {"root.": "" if not depths else "stem.", "projection.": "downsample.conv.", ".gn": ".norm"}
    state = {}
    for name, tensor in ours.state_dict().items():
        name = name.replace("projection_norm.", "downsample.norm.")
        for old, new in names.items():
            name = name.replace(old, new)
        if name.startswith("stages."):
            _, stage, rest = name.split(".", 2)
            name = f"stages.{stage}.blocks.{rest}"
        state[name] = tensor
    theirs.load_state_dict(state, strict=True)
    x = pixels(2, 3, 64, 96)
    assert difference(ours(x), theirs(x)) < 5e-6
    assert ours(x).shape[2:] == (64 // 2 ** (max(len(depths), 1) + 1), 96 // 2 ** (max(len(depths), 1) + 1))


def test_new_models_start_as_the_authors_do() -> None:
    torch.manual_seed(0)
    model, stem = ResNet(SMALL), HybridStem((1,), 3, "google")
    assert not model.head.weight.any()
    std = float(model.stages[3][0].conv2.weight.detach().std())
    assert math.isclose(std, (9 * 64) ** -0.5, rel_tol=0.05)  # LeCun normal
    assert not stem.stages[0][0].gn3.weight.any()  # a new unit passes its input on
    assert model.stages[0][0].gn3.weight.all()


@pytest.mark.parametrize("dialect", RESNET_DIALECTS)
def test_files_both_ways(dialect: str, tmp_path: Path) -> None:
    model = filled(ResNet(SMALL, vitkit.InputSpec(size=(64, 64), class_names=tuple("abcde"))))
    path = tmp_path / f"model{RESNET_DIALECTS[dialect].suffixes[0]}"
    save(model, path, dialect)
    for found in (load(path), load(path, dialect=dialect)):
        assert isinstance(found, ResNet)
        assert found.config == model.config
        assert found.input_spec == model.input_spec
        assert all(
            torch.equal(a, b) for a, b in zip(found.state_dict().values(), model.state_dict().values(), strict=True)
        )
    for other, row in RESNET_DIALECTS.items():
        again = tmp_path / f"again-{other}{row.suffixes[0]}"
        convert(path, again, other)
        assert difference(load(again)(pixels(1, 3, 64, 64)), model(pixels(1, 3, 64, 64))) < 1e-6


def test_files_without_a_head(tmp_path: Path) -> None:
    model = filled(ResNet(dataclasses.replace(SMALL, num_classes=0)))
    for dialect in ("native", "timm", "huggingface"):
        path = tmp_path / f"{dialect}{RESNET_DIALECTS[dialect].suffixes[0]}"
        save(model, path, dialect)
        assert load(path).config == model.config
    assert not any(
        name.startswith("bit.") for name in RESNET_DIALECTS["huggingface"].write(model.state_dict(), model.config)
    )
    with pytest.raises(CannotExpress, match="no head"):
        save(model, tmp_path / "model.npz", "google")


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name not in RESNET_DIALECTS])
def test_other_dialects_refuse_resnets(dialect: str, tmp_path: Path) -> None:
    with pytest.raises(CannotExpress, match=f"This model is a ResNet, which the {dialect} dialect cannot express"):
        save(ResNet(SMALL), tmp_path / f"model{DIALECTS[dialect].suffixes[0]}", dialect)


def test_changes_on_loading(tmp_path: Path) -> None:
    model = filled(ResNet(SMALL))
    save(model, tmp_path / "model.safetensors")
    assert load(tmp_path / "model.safetensors", num_classes=3).head.weight.shape == (3, 256)
    gray = load(tmp_path / "model.safetensors", num_channels=1)
    assert torch.equal(gray.root.conv.weight, model.root.conv.weight.sum(1, keepdim=True))
    assert load(tmp_path / "model.safetensors", image_size=96).input_spec.size == (96, 96)
    assert load(tmp_path / "model.safetensors", standardisation="timm").config.standardisation == "timm"
    with pytest.raises(ConfigError, match="This file holds a ResNet, which has no pool"):
        load(tmp_path / "model.safetensors", pool="mean")


def test_incomplete_files_are_refused(tmp_path: Path) -> None:
    state = RESNET_DIALECTS["timm"].write(filled(ResNet(SMALL)).state_dict(), SMALL)
    for gone in ("stages.1.blocks.0.conv2.weight", "norm.bias", "stages.1.blocks.0.downsample.conv.weight"):
        torch.save({name: tensor for name, tensor in state.items() if name != gone}, tmp_path / "model.pth")
        with pytest.raises(TensorMismatch, match=gone):
            load(tmp_path / "model.pth")
    torch.save({n: t for n, t in state.items() if not n.startswith("stages.1.blocks.0.")}, tmp_path / "model.pth")
    with pytest.raises(TensorMismatch, match="numbered without gaps"):
        load(tmp_path / "model.pth")
    torch.save(state | {"stages.0.blocks.0.norm1.running_mean": torch.zeros(3)}, tmp_path / "model.pth")
    with pytest.raises(CannotExpress, match="batch normalisation"):
        load(tmp_path / "model.pth")


def test_pixels_are_checked() -> None:
    model = ResNet(SMALL).eval()
    with pytest.raises(InputError, match=r"Expected pixels \[batch, 3, height, width\]; got \[1, 1, 64, 64\]"):
        model(pixels(1, 1, 64, 64))
    with pytest.raises(InputError, match="floating-point"):
        model(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))


def test_gradient_checkpointing_changes_nothing() -> None:
    model, x = filled(ResNet(SMALL)).train(), pixels(1, 3, 64, 64)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing = True
    model(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))


def test_stochastic_depth_drops_units() -> None:
    model = filled(ResNet(dataclasses.replace(SMALL, drop_path_rate=0.9)))
    assert [round(unit.rate, 4) for unit in model.units()] == [0.0, 0.225, 0.45, 0.675, 0.9]
    x = pixels(8, 3, 64, 64)
    torch.manual_seed(0)
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))
