"""Test-time registers: the neurons that make patches stand out are found and moved, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.explanations.models import KINDS, tiny
from vitkit import ViT, create, save
from vitkit.errors import ConfigError, InputError
from vitkit.explanations.attention import class_attention, gradient_rollout, rollout
from vitkit.explanations.common import patch_map
from vitkit.explanations.registers import STANDS_OUT, Moved, find, patch_norms, with_registers
from vitkit.jobs.explain import explain

PLANTED = [(0, 3), (1, 7)]  # the second shows only when the first is moved: it drowns what the second reads


def planted(neurons: list[tuple[int, int]] = PLANTED, **more: object) -> tuple[ViT, torch.Tensor]:
    """A model in which these neurons fire in the first patch alone, and write large values there."""
    model, x = tiny(hidden_act="relu", **more)  # type: ignore[arg-type]
    with torch.no_grad():
        model.positions.table[0, int(model.config.class_token)] = 0
        model.positions.table[0, int(model.config.class_token), 5] = 60  # lane 5 says: the first patch
        for layer, neuron in neurons:
            mlp = model.blocks[layer].mlp
            mlp.fc1.weight[neuron], mlp.fc1.bias[neuron] = 0, -3
            mlp.fc1.weight[neuron, 5] = 1
            mlp.fc2.weight[:, neuron] = 100 * torch.linspace(-1, 1, 32)
    assert patch_norms(model, x)[:, -1].reshape(2, -1).argmax(1).tolist() == [0, 0]
    return model, x


def test_moved_by_hand():
    act = Moved(nn.ReLU(), [1, 2], first=1, count=1)
    x = torch.tensor([[[1.0, 2, 3], [4, -5, 6], [7, 8, 9]]])  # three tokens; the second is the register
    assert act(x).tolist() == [[[1, 0, 0], [4, 8, 9], [7, 0, 0]]]
    two = Moved(nn.ReLU(), [0], first=0, count=2)
    assert two(x).tolist() == [[[7, 2, 3], [4, 0, 6], [0, 8, 9]]]


@pytest.mark.parametrize("more", [{}, {"num_register_tokens": 2}, {"chunk_size_feed_forward": 5}])
def test_the_planted_neurons_are_found_and_moved(more):
    model, x = planted(**more)
    said = model(x)
    found = find(model, x)
    assert list(found.neurons) == PLANTED
    assert found.before > 2 * STANDS_OUT > STANDS_OUT > found.after
    new = with_registers(model, found.neurons)
    norms = patch_norms(new, x)
    assert norms.shape == (2, 4, 4, 4)
    assert norms[:, 1:].max() < STANDS_OUT
    assert new.config.num_register_tokens == model.config.num_register_tokens + 1
    assert "neurons 4 of layer 1, 8 of layer 2 to 1 register" in str(found)
    assert torch.equal(model(x), said)  # the model itself is as it was


def test_one_neuron_is_enough_for_one():
    model, x = planted(PLANTED[1:])
    assert list(find(model, iter(x.split(1))).neurons) == PLANTED[1:]


def test_nothing_is_moved_where_nothing_stands_out():
    model, x = tiny()
    found = find(model, x)
    assert found.neurons == ()
    assert found.before == found.after < STANDS_OUT
    assert str(found).startswith("No patch stands out: the largest norm is ")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_takes_registers(kind):
    model, x = tiny(kind)
    new = with_registers(model, [(0, 1), (1, 2), (0, 3)], 2)
    weights = dict(model.named_parameters())
    for name, parameter in new.named_parameters():  # shared, not copied
        assert name == "register_tokens" or parameter.data_ptr() == weights[name].data_ptr(), name
    assert new(x).shape == model(x).shape
    assert not torch.allclose(new(x), model(x))
    np.testing.assert_allclose(rollout(new, x).sum(1), 1, rtol=1e-5)
    assert np.isfinite(gradient_rollout(new, x)).all()
    rows, columns = model.grid_of(x)
    assert patch_map(class_attention(new, x), new, (rows, columns)).shape[-2:] == (rows, columns)
    assert new.training is model.training


def test_registers_are_zero_have_no_position_and_follow_the_models_own():
    model, x = tiny("registers")
    new = with_registers(model, [(0, 1)], 2)
    z, plain = new.embed(x), model.embed(x)
    assert torch.equal(z[:, 4:6], torch.zeros(2, 2, 32))
    assert torch.equal(torch.cat([z[:, :4], z[:, 6:]], 1), plain)


@pytest.mark.parametrize("more", [{}, {"relative": "offsets"}])
def test_a_register_gets_no_attention_before_it_is_written(more):
    model, x = tiny(**more)
    new = with_registers(model, [(1, 2)], 2)
    plain, states = model.hidden_states(x), new.hidden_states(x)
    for z, z_new in zip(plain[:2], states[:2], strict=True):
        torch.testing.assert_close(torch.cat([z_new[:, :1], z_new[:, 3:]], 1), z)
    assert not torch.allclose(torch.cat([states[3][:, :1], states[3][:, 3:]], 1), plain[3], atol=1e-3)
    A = new.attention(x)
    assert (A[0][..., 1:3] == 0).all()
    assert (A[1][..., 1:3] == 0).all()
    assert (A[2][..., 1:3] > 0).all()


def test_there_are_as_many_registers_as_patches_that_stand_out():
    model, x = planted(PLANTED[1:])
    with torch.no_grad():  # the second patch says that it is the first one too
        model.positions.table[0, 2] = model.positions.table[0, 1]
    assert find(model, x).count == 2
    assert find(model, x, 3).count == 3


def test_what_cannot_be_moved_is_refused():
    model, _ = tiny()
    for neurons, count in (([(2, 0)], 1), ([(0, 48)], 1), ([(0, 1)], 0), ([(-1, 0)], 1)):
        with pytest.raises(InputError, match="layers from 0 to 1 and neurons from 0 to 47"):
            with_registers(model, neurons, count)
    with pytest.raises(InputError, match="at least one image"):
        find(model, iter(()))


def test_explain_with_registers(tmp_path: Path, capsys):
    from vitkit.cli import app

    model, _ = planted()
    save(model, tmp_path / "m.safetensors")
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    (plain,) = explain(model, tmp_path / "a.png", tmp_path / "plain")
    (one,) = explain(model, tmp_path / "a.png", tmp_path / "with", registers=True)
    assert plain.registers is None
    assert one.registers is not None
    assert list(one.registers.neurons) == PLANTED
    assert one.predictions == plain.predictions  # what the model says is its own
    with np.load(plain.folder / "arrays.npz") as a, np.load(one.folder / "arrays.npz") as b:
        np.testing.assert_array_equal(a["norms.norm"], b["norms.without"])
        assert b["norms.norm"][1:].max() < STANDS_OUT < a["norms.norm"].max()
        assert not np.allclose(a["rollout.rollout"], b["rollout.rollout"])
    app(
        [
            "explain",
            str(tmp_path / "m.safetensors"),
            str(tmp_path / "a.png"),
            "--out",
            str(tmp_path / "o"),
            "--registers",
        ],
        standalone_mode=False,
    )
    assert "Moved neurons 4 of layer 1, 8 of layer 2 to 1 register" in " ".join(capsys.readouterr().out.split())


def test_a_resnet_has_no_place_for_registers(tmp_path: Path):
    resnet = create("r50x1", num_classes=2, image_size=32)
    with pytest.raises(ConfigError, match=r"Test-time registers \(--registers\) needs a Vision Transformer"):
        list(explain(resnet, np.zeros((32, 32, 3), np.uint8), tmp_path, registers=True))
