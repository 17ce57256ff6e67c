"""Every row of every part against everything that takes models: it works, or it is refused by name."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints import tiny
from tests.peers import peer
from vitkit import as_huggingface, as_paper
from vitkit.checkpoints import DIALECTS, load, save
from vitkit.errors import CannotExpress, ConfigError, InputError
from vitkit.evaluation.predict import Images
from vitkit.explanations.attention import class_attention, gradient_rollout, rollout
from vitkit.explanations.describe import describe
from vitkit.explanations.diagram import DIAGRAMS
from vitkit.explanations.embeddings import position_similarity
from vitkit.explore.graph import OUTPUTS, Explored, check
from vitkit.features.choice import choose
from vitkit.features.head import Head, attach
from vitkit.jobs.figures import figures
from vitkit.jobs.walk import walk
from vitkit.model.config import SETS, WORDS, ViTConfig
from vitkit.model.count import flops, parameters
from vitkit.model.parts.blocks import BLOCKS
from vitkit.model.parts.fit import EVERY_PART, unfit
from vitkit.model.parts.layers import ACTIVATIONS, NORMS
from vitkit.model.parts.pools import POOLS
from vitkit.model.parts.positions import POSITIONS
from vitkit.model.parts.relative import RELATIVE, resize_steps
from vitkit.model.parts.stems import STEMS
from vitkit.model.vit import ViT
from vitkit.speed import training
from vitkit.speed.fused import Fused
from vitkit.speed.graph import Graph
from vitkit.speed.training import TAKES as FUSED_TRAINING
from vitkit.speed.training import fused_forward, refuse_fp8
from vitkit.training.optim import groups, kernels
from vitkit.training.recipes import RECIPES

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": (32, 24),
    "patch_size": 8,
    "num_classes": 5,
    "layer_norm_eps": 1e-6,
}
# What a row needs besides itself.
NEEDS: dict[str, dict[str, Any]] = {
    "pool=distilled": {"num_register_tokens": 1},
    "positions_in=every": {"positions": "2d"},
    "without_bias=head": {"num_classes": 5},
}
# Stems whose patches are larger than the images here; tests/model/test_hybrids.py has them.
LARGE = ("stem=r14/32", "stem=r26/32", "stem=r50/16", "stem=r50/32")
ROWS = [row for name, rows in WORDS.items() for value in get_args(rows) if (row := f"{name}={value}") not in LARGE]
ROWS += [f"{name}={row}" for name, rows in SETS.items() for row in get_args(rows)] + ["norms=no final"]


def fields(row: str) -> dict[str, Any]:
    """The fields of a tiny model that has a row."""
    name, value = row.split("=")
    if name == "norms":
        return {"norms": () if value == "no final" else ("final", value)}
    return {name: (value,) if name in SETS else value, **NEEDS.get(row, {})}


def model_of(row: str, **more: Any) -> ViT:
    """A tiny model with a row, in which every parameter matters."""
    torch.manual_seed(0)
    own = fields(row)
    for name in set(SETS) & set(own) & set(more):
        own[name] = tuple(r for r in more[name] if r != "final") if row == "norms=no final" else own[name] + more[name]
    model = ViT(ViTConfig(**TINY | more | own)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pixels(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (32, 24)), generator=torch.Generator().manual_seed(1))


def close(found: Tensor, expected: Tensor, bar: float = 1e-5) -> None:
    assert (found - expected).abs().max() <= bar * expected.abs().max()


# Everything that takes a model, and what shows that it computed the right thing.


def fused(model: ViT) -> None:
    close(Fused(model)(pixels()), model(pixels()))


def fused_training(model: ViT) -> None:
    if odd := unfit(model.config, FUSED_TRAINING):  # `fusible` asks the same, and the plain model trains
        raise ConfigError(f"does not take {odd}")
    close(fused_forward(model, pixels()), model(pixels()))


def fp8(model: ViT) -> None:
    try:
        with mock.patch.object(training, "multiplies_in_fp8", return_value=True):
            refuse_fp8(model.config, torch.device("cuda"))
    except ConfigError as error:
        if "multiples of 16" not in str(error):
            raise


def graph(model: ViT) -> None:
    close(Graph(model, any_size=True)(pixels()), model(pixels()))


def merging(model: ViT) -> None:
    """Merging nothing changes nothing; merging something gives finite numbers."""
    close(Graph(model, merge=0)(pixels()), model(pixels()))
    assert Graph(model, merge=2)(pixels()).isfinite().all()


def paper_classes(model: ViT) -> None:
    close(as_paper(model)(pixels()), model(pixels()))


def twelve_classes(model: ViT) -> None:
    close(as_huggingface(model)(pixels()).logits, model(pixels()))


def counting(model: ViT) -> None:
    assert parameters(model.config) == sum(p.numel() for p in model.parameters())
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counted, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model.classify(model.read(model.encode(pixels()[:1])))
    assert flops(model.config) == counted.get_total_flops()


def pruning(model: ViT) -> None:
    silent = torch.ones(2, 4)
    silent[0, [1, 2]] = silent[1, 0] = 0
    expected, before = model(pixels(), silent), model(pixels())
    model.prune_heads({0: [1, 2], 1: [0]})
    close(model(pixels()), expected)
    assert (expected - before).abs().max() > 1e-4
    assert parameters(model.config) == sum(p.numel() for p in model.parameters())


def initialising(model: ViT) -> None:
    torch.manual_seed(0)
    new = ViT(model.config)
    assert all(p.isfinite().all() for p in new.parameters())
    assert not new(pixels()).any()  # heads are zero
    assert new.features(pixels()).abs().max() > 1e-3


def decaying(model: ViT) -> None:
    """Kernels decay, and nothing else does: no norm, bias, token, table or frequency."""
    names = kernels(model)
    assert all(dict(model.named_parameters())[name].dim() > 1 for name in names)
    odd = [n for n in names if any(word in n for word in ("norm", "table", "token", "frequencies", "query", "rows"))]
    assert not odd
    assert sum(len(g["params"]) for g in groups(model, RECIPES["finetune"])) == len(list(model.parameters()))


def resizing(model: ViT) -> None:
    other = pixels(40, 48)
    expected = model(other)
    model.set_image_size((40, 48))
    close(model(other), expected)
    assert model.config.grid == (5, 6)
    assert parameters(model.config) == sum(p.numel() for p in model.parameters())


def walking(model: ViT) -> None:
    found = walk(model, torch.zeros(32, 24, 3, dtype=torch.uint8).numpy())
    assert "Eq. 4" in str(found)


def drawing(model: ViT) -> None:
    assert describe(model.config)[0].parameters == parameters(model.config)
    assert DIAGRAMS["classes"](model.config).startswith("<svg")
    assert DIAGRAMS["overview"](model.config).startswith("<svg")


def explaining(model: ViT) -> None:
    A = model.attention(pixels())
    torch.testing.assert_close(A[0].sum(-1), torch.ones_like(A[0].sum(-1)))
    z, grid = model.embed(pixels()), model.grid_of(pixels())
    for layer, block in enumerate(model.blocks):
        seen: dict[str, Any] = {"A": None}
        close(block(z, grid, seen=seen), block(z, grid))
        assert torch.equal(seen["A"], A[layer])
        part = model.attention(pixels(), layers=layer, heads=[2, 0], query=[3, 0])[layer]
        torch.testing.assert_close(part, A[layer][:, [2, 0]][:, :, [3, 0]])
        z = block(z, grid)
    assert torch.isfinite(torch.from_numpy(class_attention(model, pixels()))).all()
    assert torch.isfinite(torch.from_numpy(rollout(model, pixels()))).all()
    assert torch.isfinite(torch.from_numpy(gradient_rollout(model, pixels()))).all()


def exploring(model: ViT) -> None:
    x = pixels()[:1]
    found = dict(zip(OUTPUTS, Explored(check(model))(x, torch.ones(12)), strict=True))
    close(found["logits"], model(x)[0])
    close((found["q"] @ found["k"].mT / model.config.head_size**0.5).softmax(-1), found["attention"])
    close(found["embedded"], found["states"][0, model.config.num_prefix_tokens :] - positions_of(model))


def positions_of(model: ViT) -> Tensor | float:
    """What Eq. 1 adds to the patches; 0 where the model adds nothing."""
    added = model.positions(model.config.grid)
    return added[0, model.config.class_token :] if isinstance(added, Tensor) else 0.0


def positions(model: ViT) -> None:
    assert position_similarity(model).shape == (4, 3, 4, 3)


def probing(model: ViT) -> None:
    choice = choose(None, model.config)
    X = choice.of(model, pixels())
    assert X.shape == (2, choice.width)
    head = Head(torch.randn(4, choice.width).numpy(), torch.randn(4).numpy())
    new = attach(model, head, ["a", "b", "c", "d"], choice)
    close(new(pixels()), torch.from_numpy(head.logits(X.detach().numpy())).float())
    assert model.config.num_classes == 5


def round_trip(dialect: str) -> Callable[..., None]:
    def run(model: ViT, tmp_path: Any) -> None:
        suffix = DIALECTS[dialect].suffixes[0]
        path = tmp_path / ("folder" if not suffix else f"weights{suffix}")
        save(model, path, dialect)
        again = load(path)
        assert again.config == dataclasses.replace(model.config, initializer_range=again.config.initializer_range)
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
        assert torch.equal(again(pixels(32, 32)), model(pixels(32, 32)))

    return run


CONSUMERS: dict[str, Callable[..., None]] = {
    "fused": fused,
    "fused training": fused_training,
    "fp8": fp8,
    "graph": graph,
    "merging": merging,
    "paper classes": paper_classes,
    "twelve classes": twelve_classes,
    "counting": counting,
    "pruning": pruning,
    "initialising": initialising,
    "decaying": decaying,
    "resizing": resizing,
    "walking": walking,
    "drawing": drawing,
    "explaining": explaining,
    "exploring": exploring,
    "positions": positions,
    "probing": probing,
    **{f"dialect {name}": round_trip(name) for name in DIALECTS},
}
# What a dialect needs besides the row: DINOv2 has no head, and its Hugging Face classes always have layer scale.
SQUARE = {"image_size": 32, "intermediate_size": 64}
OF_DIALECT: dict[str, dict[str, Any]] = {
    "dinov2": {"num_classes": 0},
    "dinov2-hf": {"num_classes": 0, "layer_scale": 1.0},
}
# Dialects of one family each: a row is put on top of that family's own.
FAMILIES: dict[str, dict[str, Any]] = {
    "clip": tiny.CLIP,
    "clip-hf": tiny.CLIP,
    "siglip-hf": {**tiny.SIGLIP, "pool": "map", "num_classes": 0},
    "dinov3": tiny.DINOV3,
    "dinov3-hf": tiny.DINOV3,
    "beit-hf": {**tiny.BEIT, "pool": "cls", "norm_after_pool": False},
    "aimv2-hf": tiny.AIMV2,
}
TAKE_ALL = {"graph", "counting", "initialising", "decaying", "explaining", "probing", "dialect native"}
SAYS_NO = (ConfigError, CannotExpress, InputError)


@pytest.mark.filterwarnings("ignore:.*FlopCounter.*")
@pytest.mark.parametrize("name", CONSUMERS)
def test_everything_takes_a_row_or_refuses_it_by_name(name: str, tmp_path, caplog) -> None:
    caplog.set_level(logging.ERROR)
    taken, refused = list[str](), dict[str, str]()
    dialect = name.removeprefix("dialect ") if name.startswith("dialect ") else ""
    for number, row in enumerate(ROWS):
        more = {**SQUARE, **(OF_DIALECT | FAMILIES).get(dialect, {})} if dialect else {}
        try:
            model = model_of(row, **more)
            if dialect:
                (tmp_path / str(number)).mkdir()
                CONSUMERS[name](model, tmp_path / str(number))
            else:
                CONSUMERS[name](model)
        except SAYS_NO as error:
            refused[row] = str(error)
        else:
            taken.append(row)
    own = {name: FAMILIES.get(dialect, {}).get(name, get_args(rows)[0]) for name, rows in WORDS.items()}
    assert {f"{name}={row}" for name, row in own.items()} | {"norms=final"} <= set(taken)
    for row, message in refused.items():
        words = [row, row.replace("=", "='") + "'", {"pool=mean": "mean pooling"}.get(row, row)]
        words += ["register tokens", "num_register_tokens", "no registers"] if row == "pool=distilled" else []
        assert any(word in message for word in words), (row, message)
    if name in TAKE_ALL:
        assert taken == ROWS


def test_tables_and_words_agree() -> None:
    tables = {
        "hidden_act": ACTIVATIONS,
        "block": BLOCKS,
        "norm": NORMS,
        "stem": STEMS,
        "positions": POSITIONS,
        "relative": RELATIVE,
        "pool": POOLS,
    }
    for name, table in tables.items():
        assert tuple(table) == get_args(WORDS[name])
    assert set(WORDS) == {*tables, "positions_in"}
    paper = ViTConfig()
    assert not unfit(paper, {})
    for name, rows in WORDS.items():
        assert getattr(paper, name) == get_args(rows)[0]
    for row in set(ROWS) - {f"{name}={getattr(paper, name)}" for name in WORDS} - {"norms=final"}:
        assert row in unfit(ViTConfig(**TINY | fields(row)), {})
        assert not unfit(ViTConfig(**TINY | fields(row)), EVERY_PART)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block": "post-norm"}, ["block", "res-post-norm", "got 'post-norm'"]),
        ({"norms": "final"}, ["norms must be a list", "got 'final'"]),
        ({"norms": ("last",)}, ["norms", "final", "got 'last'"]),
        ({"pool": "cls+mean", "class_token": False}, ["needs a class token"]),
        ({"pool": "distilled"}, ["num_register_tokens=1"]),
        ({"pool": "map", "norm_after_pool": True}, ["norm_after_pool needs pool='mean'"]),
        ({"pool": "mean", "norm_after_pool": True, "norms": ()}, ["final"]),
        ({"pool_heads": 2}, ["pool_heads needs pool='map'"]),
        ({"pool": "map", "pool_heads": 3}, ["pool_heads must divide", "32"]),
        ({"pool": "cls+mean", "pre_logits": True}, ["pre_logits"]),
        ({"without_bias": ("keys",), "qkv_bias": False}, ["qkv_bias=True"]),
        ({"positions_in": "every", "positions": "none"}, ["positions='none'"]),
        ({"positions_in": "shared", "block": "parallel"}, ["block='parallel'"]),
        ({"positions": "2d", "hidden_size": 33, "num_attention_heads": 3}, ["divisible by 2", "33"]),
        ({"relative": "eva02", "num_attention_heads": 16}, ["divisible by 4", "got 2"]),
        ({"relative": "bias", "num_register_tokens": 1}, ["no registers"]),
        ({"relative_grid": (4, 4)}, ["relative_grid needs a rotation"]),
    ],
)
def test_parts_that_cannot_work_are_refused(changes, words) -> None:
    with pytest.raises(ConfigError) as error:
        ViTConfig(**TINY | changes)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch about timm
@pytest.mark.parametrize("grid", [(5, 6), (3, 2), (7, 4)])
def test_steps_are_resized_as_timm_does(grid) -> None:
    resize = peer("timm.layers.pos_embed_rel").resize_rel_pos_bias_table
    table = torch.randn(7 * 7 + 3, 2, generator=torch.Generator().manual_seed(0))
    rows = (2 * grid[0] - 1) * (2 * grid[1] - 1) + 3
    torch.testing.assert_close(resize_steps(table, (4, 4), grid, "timm"), resize(table, grid, (rows, 2)))


def test_an_offset_counts_the_patches_in_between() -> None:
    """Appendix D.4: the query times the embedding of the offset p_q - p_k is added to q k / sqrt(d)."""
    model = model_of("relative=offsets")
    msa, z = model.blocks[0].msa, torch.randn(1, 13, 32, generator=torch.Generator().manual_seed(2))
    q, _, _, bias = msa.project(z, (4, 3))
    table, d = msa.relative.table, 8
    for i, j in ((0, 0), (0, 11), (11, 0), (5, 7)):  # patches; the class token is token 0
        expected = q[0, :, 1 + i] @ table[i - j + 11] / d**0.5
        torch.testing.assert_close(bias[0, :, 1 + i, 1 + j], expected)
    assert not bias[0, :, 0].any()
    assert not bias[0, :, :, 0].any()


def test_a_rotation_leaves_only_the_step_between_two_patches() -> None:
    """q k of two patches depends on their places by their difference alone; prefix tokens are not turned."""
    for row in ("eva02", "axial", "perception", "mixed"):
        model = model_of(f"relative={row}")
        z = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(3)).expand(1, 13, 32)  # all tokens alike
        q, k, _, bias = model.blocks[0].msa.project(z, (4, 3))
        assert bias is None
        A = (q @ k.mT)[0, :, 1:, 1:].unflatten(2, (4, 3)).unflatten(1, (4, 3))  # [h, row, column, row, column]
        torch.testing.assert_close(A[:, 0, 0, 2, 1], A[:, 1, 1, 3, 2])
        assert (A[:, 0, 0, 2, 1] - A[:, 0, 0, 1, 2]).abs().max() > 1e-3
        torch.testing.assert_close(q[:, :, 0], q[:, :, 1] if row != "perception" else q[:, :, 0])


def test_mixed_frequencies_start_as_in_their_paper() -> None:
    torch.manual_seed(0)
    found = ViT(ViTConfig(**TINY | {"relative": "mixed"})).blocks[0].msa.relative.frequencies
    size = found.square().sum(0)  # the two axes of a frequency are at right angles
    assert size.shape == (4, 4)
    expected = torch.tensor([1.0, 10**-0.5, 1.0, 10**-0.5])
    torch.testing.assert_close(size.sqrt(), expected.expand(4, 4))


def test_figures_leave_out_what_a_model_does_not_have(tmp_path, caplog) -> None:
    caplog.set_level(logging.WARNING, logger="vitkit")
    model = model_of("positions=none")
    written = dict(figures(model, Images([np.zeros((32, 24, 3), np.uint8)] * 2), tmp_path))
    assert "filters" in written
    assert not {"positions", "position-grid"} & set(written)
    assert "positions, position-grid left out" in caplog.text
