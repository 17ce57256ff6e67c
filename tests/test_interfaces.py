"""as_vit, as_paper, as_huggingface: the same numbers in every interface, and nothing guessed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vitkit
from tests.peers import peer
from vitkit import ViT, ViTConfig, huggingface, paper
from vitkit.errors import CannotExpress, ConfigError, InputError
from vitkit.interfaces import as_huggingface, as_paper, as_vit, copy_weights
from vitkit.speed.engines import ENGINES, usual

CONFIG = ViTConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    intermediate_size=48,
    image_size=(32, 48),
    patch_size=8,
    num_classes=5,
    layer_norm_eps=1e-3,
    hidden_act="gelu_tanh",
)
X = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))


def random(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.eval()


def close(a: Tensor, b: Tensor) -> None:
    assert (a - b).abs().max() <= 5e-6 * b.abs().max()


@torch.no_grad()
def test_paper_and_back() -> None:
    model = random(paper.ViT((32, 48), 3, 8, 2, 32, 48, 8, 5, attn_dropout=0.2, mlp_dropout=0.3, embedding_dropout=0.4))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-3
    vit = as_vit(model)
    assert vit.config == dataclasses.replace(
        CONFIG, hidden_act="gelu", hidden_dropout_prob=0.4, attention_probs_dropout_prob=0.2, position_resize="google"
    )
    assert (vit.dropout.p, vit.blocks[0].mlp.dropout.p, vit.blocks[0].msa.dropout.p) == (0.4, 0.3, 0.0)
    close(vit(X), model(X))
    back = as_paper(vit)
    close(back(X), model(X))
    assert as_vit(vit) is vit
    assert as_vit(torch.compile(vit, backend="eager")) is vit


@torch.no_grad()
@pytest.mark.parametrize("labels", [5, 0])
def test_twelve_and_back(labels: int) -> None:
    config = dataclasses.replace(CONFIG, num_classes=labels)
    model = random(huggingface.ViTForImageClassification(config))
    expected = model(X).logits if labels else model.vit(X).last_hidden_state[:, 0]
    vit = as_vit(model)
    assert (vit.config.num_classes, vit.config.num_attention_heads, vit.config.layer_norm_eps) == (labels, 8, 1e-3)
    close(vit(X), expected)
    back = as_huggingface(vit)
    if labels:
        close(back(X).logits, expected)
    else:
        close(back(X).last_hidden_state[:, 0], expected)


@torch.no_grad()
@pytest.mark.parametrize("mask", [True, False])
def test_a_pooler_is_the_pre_logits_layer(mask: bool) -> None:
    model = random(huggingface.ViTModel(CONFIG, use_mask_token=mask))
    vit = as_vit(model)
    assert vit.config.pre_logits
    assert not vit.config.num_classes
    close(vit.classify(vit.features(X)), model(X).pooler_output)
    close(as_huggingface(vit)(X).pooler_output, model(X).pooler_output)
    vit.norm.weight.mul_(2)
    copy_weights(vit, model)
    close(vit.classify(vit.features(X)), model(X).pooler_output)


@torch.no_grad()
def test_pruned_heads_stay_pruned() -> None:
    model = random(huggingface.ViTForImageClassification(CONFIG))
    model.prune_heads({0: [1, 3], 1: [7]})
    vit = as_vit(model)
    assert vit.config.pruned_heads == ((0, (1, 3)), (1, (7,)))
    close(vit(X), model(X).logits)
    close(as_huggingface(vit)(X).logits, model(X).logits)
    with pytest.raises(CannotExpress, match="no place for pruned_heads"):
        as_paper(vit)


@torch.no_grad()
def test_weights_go_back_into_the_object() -> None:
    for model in (
        random(paper.ViT((32, 48), 3, 8, 2, 32, 48, 8, 5)),
        random(huggingface.ViTForImageClassification(CONFIG)),
    ):
        vit = as_vit(model)
        for p in vit.parameters():
            nn.init.normal_(p, std=0.2)
        found = model(X)
        before = found if isinstance(found, Tensor) else found.logits
        copy_weights(vit, model)
        found = model(X)
        after = found if isinstance(found, Tensor) else found.logits
        assert (after - before).abs().max() > 0.1
        close(vit(X), after)


def test_a_copy_does_not_share_memory() -> None:
    model = paper.ViT((32, 48), 3, 8, 2, 32, 48, 8, 5)
    vit = as_vit(model)
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {p.data_ptr() for p in vit.parameters()}


def test_what_cannot_be_expressed_is_refused() -> None:
    with pytest.raises(CannotExpress, match=r"layer_scale=0.1, num_register_tokens=2"):
        as_paper(ViT(dataclasses.replace(CONFIG, layer_scale=0.1, num_register_tokens=2)))
    with pytest.raises(ConfigError, match="no place for num_register_tokens"):
        as_huggingface(ViT(dataclasses.replace(CONFIG, num_register_tokens=2)))
    with pytest.raises(CannotExpress, match="always has a classifier"):
        as_paper(ViT(dataclasses.replace(CONFIG, num_classes=0)))
    for other in (nn.Linear(2, 2), "vit-b/16", None):
        with pytest.raises(InputError, match=r"Expected a vitkit.ViT, a vitkit.paper.ViT or one of the twelve"):
            as_vit(other)


class TypedEncoderBlock(nn.Module):
    """The lesson's classes as a learner types them: the names are the lesson's, the code is the learner's."""

    def __init__(self, D: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.msa_block, self.mlp_block = nn.Module(), nn.Module()
        self.msa_block.layer_norm = nn.LayerNorm(D)
        self.msa_block.multihead_attn = nn.MultiheadAttention(D, heads, batch_first=True)
        self.mlp_block.layer_norm = nn.LayerNorm(D)
        self.mlp_block.mlp = nn.Sequential(
            nn.Linear(D, mlp), nn.GELU(), nn.Dropout(0.1), nn.Linear(mlp, D), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        z = self.msa_block.layer_norm(x)
        x = self.msa_block.multihead_attn(z, z, z, need_weights=False)[0] + x
        return self.mlp_block.mlp(self.mlp_block.layer_norm(x)) + x


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(1, 1, 24))
        self.position_embedding = nn.Parameter(torch.randn(1, 17, 24))
        self.embedding_dropout = nn.Dropout(0.1)
        self.patch_embedding = nn.Module()
        self.patch_embedding.patcher = nn.Conv2d(3, 24, 8, stride=8)
        self.transformer_encoder = nn.Sequential(*(TypedEncoderBlock(24, 6, 40) for _ in range(3)))
        self.classifier = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 3))

    def forward(self, x: Tensor) -> Tensor:
        z = self.patch_embedding.patcher(x).flatten(2).permute(0, 2, 1)
        z = torch.cat([self.class_embedding.expand(len(x), -1, -1), z], dim=1) + self.position_embedding
        return self.classifier(self.transformer_encoder(self.embedding_dropout(z))[:, 0])


@torch.no_grad()
def test_a_model_typed_from_the_lesson() -> None:
    model, x = Typed().eval(), torch.randn(2, 3, 32, 32)
    vit = as_vit(model)
    assert (vit.config.num_attention_heads, vit.config.num_hidden_layers, vit.config.layer_norm_eps) == (6, 3, 1e-5)
    close(vit(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("hidden", [True, False])
def test_the_papers_two_heads(hidden: bool) -> None:
    """The pre-training head has one hidden tanh layer."""
    model = random(paper.ViT((32, 48), 3, 8, 2, 32, 48, 8, 5, pre_logits=hidden))
    assert len(model.classifier) == (4 if hidden else 2)
    vit = as_vit(model)
    assert vit.config.pre_logits == hidden
    close(vit(X), model(X))
    close(as_paper(vit)(X), model(X))


def test_how_the_lesson_and_the_authors_start() -> None:
    torch.manual_seed(0)
    lesson, authors = paper.ViT(num_transformer_layers=1), paper.ViT(num_transformer_layers=1, authors_start=True)
    assert abs(lesson.position_embedding.std() - 1) < 0.02
    assert abs(lesson.class_embedding.std() - 1) < 0.1
    assert abs(authors.position_embedding.std() - 0.02) < 0.001
    assert not authors.class_embedding.any()


@torch.no_grad()
def test_torchs_own_encoder_layer_is_the_same_block() -> None:
    ours, theirs = paper.TransformerEncoderBlock(32, 4, 64).eval(), paper.torch_encoder_block(32, 4, 64).eval()
    names = {
        "self_attn": ours.msa_block.multihead_attn,
        "norm1": ours.msa_block.layer_norm,
        "linear1": ours.mlp_block.mlp[0],
        "linear2": ours.mlp_block.mlp[3],
        "norm2": ours.mlp_block.layer_norm,
    }
    theirs.load_state_dict(
        {f"{name}.{part}": t for name, module in names.items() for part, t in module.state_dict().items()}
    )
    z = torch.randn(2, 17, 32)
    close(theirs(z), ours(z))


@torch.no_grad()
def test_from_pretrained_and_save_pretrained(tmp_path: Path) -> None:
    model = random(huggingface.ViTForImageClassification(CONFIG))
    model.save_pretrained(str(tmp_path / "hub"))
    assert sorted(p.name for p in (tmp_path / "hub").iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    again = huggingface.ViTForImageClassification.from_pretrained(str(tmp_path / "hub"))
    close(again(X).logits, model(X).logits)
    bare = huggingface.ViTModel.from_pretrained(str(tmp_path / "hub"))
    close(bare(X).last_hidden_state, model.vit(X).last_hidden_state)
    assert bare.pooler is None
    other = huggingface.ViTForImageClassification.from_pretrained(str(tmp_path / "hub"), num_labels=7)
    assert other(X).logits.shape == (2, 7)
    values = json.loads((tmp_path / "hub" / "config.json").read_text(encoding="utf-8"))
    assert {"architectures", "model_type"} <= set(values)
    found = huggingface.ViTConfig.from_dict(values)
    assert (found.hidden_size, found.num_attention_heads, found.num_classes) == (32, 8, 5)
    with pytest.raises(ConfigError, match="has no field 'colour'"):
        huggingface.ViTConfig.from_dict({"colour": "red"})


def test_embeddings_alone_start_random() -> None:
    found = huggingface.ViTEmbeddings(CONFIG)
    assert 0.005 < found.cls_token.std() < 0.05
    assert 0.01 < found.position_embeddings.std() < 0.03


@torch.no_grad()
@pytest.mark.parametrize("act", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "selu", "silu", "quick_gelu"])
def test_activations_of_the_hub(act: str, tmp_path: Path) -> None:
    """By name, equal to transformers, kept by the files that can keep them."""
    transformers = peer("transformers")
    config = dataclasses.replace(CONFIG, hidden_act=act)
    model = random(ViT(config))
    twelve = as_huggingface(model)
    close(twelve(X).logits, model(X))
    twelve.save_pretrained(str(tmp_path / "hub"))
    if act != "selu":  # which transformers has not, or no longer
        theirs = transformers.ViTForImageClassification.from_pretrained(tmp_path / "hub", local_files_only=True).eval()
        close(theirs(X).logits, model(X))
    assert vitkit.load(tmp_path / "hub").config.hidden_act == config.hidden_act
    if config.hidden_act not in ("gelu", "gelu_tanh"):
        with pytest.raises(CannotExpress, match=f"hidden_act={config.hidden_act}"):
            vitkit.save(model, tmp_path / "m.pth", "torchvision")
        if act == "quick_gelu":  # timm has it, in its CLIP models
            vitkit.save(model, tmp_path / "m.pth", "timm")
            assert vitkit.load(tmp_path / "m.pth").config.hidden_act == act
        else:
            with pytest.raises(CannotExpress, match=f"hidden_act={config.hidden_act}"):
                vitkit.save(model, tmp_path / "m.pth", "timm")
        with pytest.raises(ConfigError, match=f"do not compute hidden_act={config.hidden_act}"):
            ENGINES["cpu-fused"].build(model)
        assert usual(model) == "torch"
        with pytest.raises(CannotExpress, match=f"no place for hidden_act={config.hidden_act}"):
            as_paper(model)


def test_an_activation_is_named_by_a_word() -> None:
    with pytest.raises(ConfigError, match="hidden_act must be one of gelu, gelu_tanh, quick_gelu, relu, selu, silu"):
        ViTConfig(hidden_act=torch.relu)
