"""RECIPES: the paper's Tables 3 and 4, later publications, and our own. `vitkit recipes` prints them."""

from __future__ import annotations

from dataclasses import replace

from vitkit.data.augment import Augment
from vitkit.data.mix import Mix
from vitkit.model.config import HYBRIDS, NUMERICS, SHAPES, ViTConfig
from vitkit.model.resnet_config import RESNETS
from vitkit.training.recipe import INCEPTION, Recipe

PAPER = "arXiv 2010.11929"

# Table 3 and its text: Adam with betas .9 and .999, batch 4096, 10k warm-up steps, 224 px; on ImageNet also clip 1.
# The linear decay's end is in the authors' code; the sigmoid loss and its bias on ImageNet-21k were published later.
_TABLE3 = Recipe(
    source=f"{PAPER}, Table 3",
    ours="The share of train that is held out.",
    batch_size=4096,
    lr=8e-4,
    warmup=10_000,
    image_size=224,
    epochs=7,
    decay="linear",
    final_lr=1e-5,
    weight_decay=0.1,
    pre_logits=True,
    val=0.01,
)
_JFT = replace(_TABLE3, expect="Pre-training on JFT-300M, or another very large set.")
_JFT_RESNET = replace(_JFT, ours="The share of train that is held out; the head is one linear layer.", pre_logits=False)
_21K = replace(
    _TABLE3,
    expect="Pre-training on ImageNet-21k.",
    lr=1e-3,
    weight_decay=0.03,
    dropout=0.1,
    loss="sigmoid",
    head_bias=-10.0,
)
_IMAGENET = replace(
    _TABLE3,
    expect="ImageNet from scratch. The paper reports 77.9% for B/16 at 384 px (Table 5).",
    epochs=300,
    lr=3e-3,
    decay="cosine",
    final_lr=0.0,
    weight_decay=0.3,
    dropout=0.1,
    clip=1.0,
)

# Table 4 and B.1.1: SGD with momentum, batch 512, cosine, no weight decay, clip 1, 384 px, a new head of zeros. The
# learning rate is chosen on a held-out part of train. The warm-up of 500 steps is in the authors' code.
_TABLE4 = Recipe(
    source=f"{PAPER}, Table 4 and B.1.1",
    batch_size=512,
    optimizer="sgd",
    lr=0.01,
    image_size=384,
    steps=20_000,
    warmup=500,
    clip=1.0,
    lr_choices=(0.003, 0.01, 0.03),
    val=0.01,
)
# B.1.1: on ImageNet, ResNets and hybrids also try 0.06.
_SWEPT_FURTHER = (*RESNETS, *HYBRIDS)
_SMALL_SETS = replace(_TABLE4, lr_choices=(0.001, 0.003, 0.01, 0.03))
_500_STEPS = replace(
    _SMALL_SETS,
    ours="The warm-up: the 500 steps of the authors' code would be the whole run.",
    steps=500,
    warmup=100,
    val=0.1,
)

# "How to train your ViT?": ImageNet, 300 epochs at lr 1e-3. A level is a strength of MixUp and of RandAugment.
_AUGREG = replace(
    _IMAGENET,
    source="arXiv 2106.10270, section 3",
    ours="The choice among the weight decays, dropouts and stochastic depths that the paper tries; the held-out share.",
    lr=1e-3,
    weight_decay=0.1,
    dropout=0.0,
    pre_logits=False,
    expect="ImageNet from scratch, regularised by augmentation.",
)


def _augreg(mixup: float, layers: int, magnitude: float) -> Recipe:
    return replace(
        _AUGREG, augment=replace(INCEPTION, rand_layers=layers, rand_magnitude=magnitude), mix=Mix(mixup=mixup)
    )


# The start rate and the floor are in DeiT's code; timm's scheduler counts its cosine from the start of the run.
_DEIT = Recipe(
    source="arXiv 2012.12877, Table 9",
    ours="The rate changes with every update, not every epoch; no repeated augmentation; RandAugment has a fixed "
    "magnitude and the ViT authors' operations; the share of train that is held out.",
    expect="ImageNet from scratch. DeiT reports 79.8% for S/16, 81.8% for B/16.",
    image_size=224,
    epochs=300,
    batch_size=1024,
    lr=1e-3,
    lr_rule="linear",
    weight_decay=0.05,
    decay_from="start",
    final_lr=1e-5,
    warmup=5 / 300,
    warmup_lr=1e-6,
    label_smoothing=0.1,
    drop_path=0.1,
    val=0.01,
    augment=Augment(interpolation="bicubic", rand_layers=2, rand_magnitude=9, erase=0.25, erase_fill="noise"),
    mix=Mix(mixup=0.8, cutmix=1.0),
)


def _small(**changes: object) -> ViTConfig:
    return ViTConfig(**{**NUMERICS["paper"], **changes})


_DIGITS = _small(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=256,
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_classes=10,
)
_FASHION = _small(
    hidden_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    intermediate_size=1024,
    image_size=28,
    patch_size=4,
    num_channels=1,
    num_classes=10,
)
_CIFAR = _small(
    hidden_size=384,
    num_hidden_layers=9,
    num_attention_heads=6,
    intermediate_size=1536,
    image_size=32,
    patch_size=4,
    num_classes=10,
    pool="mean",
    class_token=False,
)
_FOOD = _small(
    hidden_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    intermediate_size=512,
    image_size=64,
    patch_size=8,
    num_classes=3,
)

# "Better plain ViT baselines for ImageNet-1k", and its code: configs/vit_s16_i1k.py of big_vision.
_PLAIN_S16 = Recipe(
    source="arXiv 2205.01580",
    ours="The first moment of AdamW is kept in fp32, not bf16.",
    expect="ImageNet from scratch. The paper reports 76.5% for S/16 after 90 epochs.",
    config=ViTConfig(
        **SHAPES["s"],
        **NUMERICS["google"],
        patch_size=16,
        pool="mean",
        class_token=False,
        positions="sincos",
        pre_logits=True,
    ),
    image_size=224,
    eval_crop=224 / 256,
    epochs=90,
    batch_size=1024,
    lr=1e-3,
    weight_decay=0.1,
    warmup=10_000,
    clip=1.0,
    pre_logits=True,
    val=0.01,
    augment=replace(INCEPTION, rand_layers=2, rand_magnitude=10),
    mix=Mix(mixup=0.2),
)

# B.1.2: self-supervision with B/16 on JFT. The paper names no weight decay, and no augmentation beyond its own.
_MASKED = Recipe(
    source=f"{PAPER}, B.1.2",
    ours="The augmentation, and the share of train that is held out.",
    objective="masked-patch",
    models=("vit-b/16",),
    expect="A very large set without labels; fine-tuned to ImageNet, the paper reports 79.9%, from scratch 77.9%.",
    image_size=224,
    steps=1_000_000,
    batch_size=4096,
    optimizer="adam",
    lr=2e-4,
    warmup=10_000,
    val=0.01,
)
_MASKED_SMALL = Recipe(
    source="ours",
    objective="masked-patch",
    small_data=True,
    epochs=100,
    batch_size=128,
    lr=1e-3,
    weight_decay=0.05,
    warmup=0.05,
    clip=1.0,
    augment=Augment(scale=(0.5, 1.0)),
)

# Fine-tuning of a folder of photos; the same from the probe's head is what `vitkit tune` tries after the probe.
_FINETUNE = Recipe(
    source="ours",
    expect="A folder of photos, with pre-trained weights (--from).",
    epochs=20,
    batch_size=32,
    lr=1e-3,
    weight_decay=0.05,
    warmup=0.1,
    clip=1.0,
    layer_decay=0.75,
    augment=Augment(scale=(0.4, 1.0)),
    label_smoothing=0.1,
)
_FROM_PROBE = replace(
    _FINETUNE,
    expect="A folder of photos, with pre-trained weights (--from); `vitkit tune` tries it after the probe.",
    epochs=6,
    lr=3e-4,
    from_probe=True,
)

# Fashion-MNIST from scratch by AdamW, and what trains small images in minutes on one GPU: augmented there, the matrices
# trained by Muon.
_FASHION_ADAMW = Recipe(
    source="ours",
    small_data=True,
    config=_FASHION,
    expect="Fashion-MNIST from scratch as the studies train it: 94.0% on test, 5 minutes on an accelerator.",
    epochs=123,
    batch_size=256,
    lr=1e-3,
    weight_decay=0.05,
    warmup=0.05,
    clip=1.0,
    ema=0.9995,
    drop_path=0.1,
    label_smoothing=0.1,
    val=0.05,
    augment=Augment(scale=(0.7, 1.0), ratio=(0.8, 1.25), erase=0.25),
    mix=Mix(cutmix=1.0, probability=0.3),
)
_FASHION_MUON = replace(
    _FASHION_ADAMW,
    source="ours; the size of patches was chosen on a held-out part of train, the epochs so that both recipes "
    "together fit into 8 minutes on one H200",
    config=replace(_FASHION, num_attention_heads=4, pool="mean", class_token=False),
    expect="Fashion-MNIST (idx:DIR) from scratch: 95.0% on test, mean of three seeds, in 2 minutes of an H200.",
    epochs=150,
    batch_size=512,
    optimizer="muon",
    lr=3e-3,
    momentum=0.95,
    ema=0.999,
    val=0.02,
    augment_on="device",
)

RECIPES: dict[str, Recipe] = {
    "pretrain-jft-b": replace(_JFT, models=("vit-b/16", "vit-b/32")),
    "pretrain-jft-l32": replace(_JFT, models=("vit-l/32",), lr=6e-4),
    "pretrain-jft-l16": replace(_JFT, models=("vit-l/16",), lr=4e-4),
    "pretrain-jft-l16-14": replace(_JFT, models=("vit-l/16",), lr=4e-4, epochs=14),
    "pretrain-jft-h14": replace(_JFT, models=("vit-h/14",), lr=3e-4, epochs=14),
    "pretrain-jft-r50": replace(_JFT_RESNET, models=("r50x1", "r50x2"), lr=1e-3),
    "pretrain-jft-r101": replace(_JFT_RESNET, models=("r101x1",), lr=8e-4),
    "pretrain-jft-r152": replace(_JFT_RESNET, models=("r152x1", "r152x2"), lr=6e-4),
    "pretrain-jft-r50-b": replace(_JFT, models=("r50+vit-b/16", "r50+vit-b/32")),
    "pretrain-jft-r50-l32": replace(_JFT, models=("r50+vit-l/32",), lr=2e-4),
    "pretrain-jft-r50-l16": replace(_JFT, models=("r50+vit-l/16",), lr=4e-4),
    "pretrain-jft-r50-l16-14": replace(_JFT, models=("r50+vit-l/16",), lr=4e-4, epochs=14),
    "pretrain-21k-b": replace(_21K, models=("vit-b/16", "vit-b/32"), epochs=90),
    "pretrain-21k-l-30": replace(_21K, models=("vit-l/16", "vit-l/32"), epochs=30),
    "pretrain-21k-l-90": replace(_21K, models=("vit-l/16", "vit-l/32"), epochs=90),
    "pretrain-imagenet": _IMAGENET,
    "masked-patch": _MASKED,
    "masked-patch-100k": replace(
        _MASKED, steps=100_000, expect="As masked-patch, in a tenth of the steps: nearly as good, says the paper."
    ),
    "masked-patch-small": replace(
        _MASKED_SMALL,
        config=_FOOD,
        expect="A few thousand photos without labels, in a small model of its own at 64 px.",
        epochs=100,
        batch_size=128,
    ),
    "masked-patch-fashion": replace(
        _MASKED_SMALL, config=_FASHION, expect="Fashion-MNIST without labels.", epochs=50, batch_size=512, val=0.05
    ),
    "finetune-imagenet": replace(_TABLE4, expect="From ImageNet-21k: B/16 83.97%, L/16 85.15% (Table 5)."),
    "finetune-imagenet-resnet": replace(
        _TABLE4,
        models=_SWEPT_FURTHER,
        lr_choices=(0.003, 0.01, 0.03, 0.06),
        expect="From JFT, 7 epochs: R50x1 77.54%, R152x2 84.97%, R50+ViT-B/16 85.58% (Table 6).",
    ),
    "finetune-cifar10": replace(_SMALL_SETS, steps=10_000, val=0.02, expect="From 21k: B/16 98.95% (Table 5)."),
    "finetune-cifar100": replace(_SMALL_SETS, steps=10_000, val=0.02, expect="From 21k: B/16 91.67% (Table 5)."),
    "finetune-pets": replace(_500_STEPS, expect="From 21k: B/16 94.43% (Table 5)."),
    "finetune-flowers": replace(_500_STEPS, expect="From 21k: B/16 99.38% (Table 5)."),
    "finetune-vtab": replace(
        _TABLE4,
        ours="The share of train that is held out.",
        steps=2_500,
        lr_choices=(0.01,),
        val=0.1,
        expect="VTAB, 1,000 images per task.",
    ),
    "finetune-512": replace(
        _TABLE4,
        source=f"{PAPER}, Table 2",
        models=("vit-l/16",),
        image_size=512,
        ema=0.9999,
        expect="ImageNet from JFT: L/16 87.76%, from 21k 85.30% (Table 2).",
    ),
    "finetune-518": replace(
        _TABLE4,
        source=f"{PAPER}, Table 2",
        models=("vit-h/14",),
        image_size=518,
        ema=0.9999,
        expect="ImageNet from JFT: H/14 88.55% (Table 2).",
    ),
    "augreg-none": _AUGREG,
    "augreg-light1": _augreg(0.0, 2, 0),
    "augreg-light2": _augreg(0.2, 2, 10),
    "augreg-medium1": _augreg(0.2, 2, 15),
    "augreg-medium2": _augreg(0.5, 2, 15),
    "augreg-strong1": _augreg(0.5, 2, 20),
    "augreg-strong2": _augreg(0.8, 2, 20),
    "deit": _DEIT,
    "imagenet-s16-90": _PLAIN_S16,
    "small-data": replace(
        _DEIT,
        source="arXiv 2012.12877, Table 9",
        ours="As for deit; and batch size, lr, warm-up and held-out share, for few images.",
        expect="A few thousand images from scratch. Fine-tuning will do better.",
        batch_size=128,
        lr=5e-4,
        warmup=0.05,
        small_data=True,
        val=0.1,
    ),
    "finetune": _FINETUNE,
    "from-probe": _FROM_PROBE,
    "from-probe-long": replace(
        _FROM_PROBE,
        expect="As from-probe, for hundreds of photos per class: longer, and further from the backbone.",
        epochs=20,
        lr=1e-3,
    ),
    "from-probe-lora": replace(
        _FROM_PROBE,
        expect="As from-probe with low-rank adapters: for few photos, or little memory.",
        epochs=10,
        lr=2e-3,
        layer_decay=None,
        lora=8,
    ),
    "digits": Recipe(
        source="ours, tuned on a held-out part of train",
        small_data=True,
        config=_DIGITS,
        expect="scikit-learn's digits from scratch: over 97% in under 3 minutes on 2 cores.",
        epochs=45,
        batch_size=32,
        lr=3e-3,
        weight_decay=0.1,
        warmup=0.1,
        clip=1.0,
        label_smoothing=0.1,
        augment=Augment(scale=(0.85, 1.0), ratio=(0.9, 1.1), flip=0.0),
    ),
    "fashion": _FASHION_MUON,
    "fashion-adamw": _FASHION_ADAMW,
    "cifar10": replace(
        _FASHION_MUON,
        config=_CIFAR,
        expect="CIFAR-10 (cifar10:DIR) from scratch: 95.0% on test, mean of three seeds, in 4.3 minutes of an H200.",
        epochs=200,
        drop_path=0.15,
        augment=Augment(scale=None, pad=4, trivial=True),
        mix=Mix(cutmix=1.0, probability=0.5),
    ),
    "foodvision-scratch": Recipe(
        source="ours, tuned on a held-out part of train",
        small_data=True,
        config=_FOOD,
        expect="FoodVision Mini (225 images) from scratch: over 55%; the course reports 26%.",
        epochs=100,
        batch_size=32,
        lr=1e-3,
        weight_decay=0.1,
        warmup=0.1,
        clip=1.0,
        label_smoothing=0.1,
        augment=Augment(scale=(0.25, 1.0), color_jitter=0.4),
        mix=Mix(mixup=0.2, cutmix=0.5, probability=0.5),
    ),
    "foodvision-finetune": Recipe(
        source="ours, tuned on a held-out part of train",
        expect="FoodVision Mini from a pre-trained Ti/16 (--from): at least 71 of its 75 test images.",
        epochs=5,
        batch_size=32,
        lr=5e-4,
        weight_decay=0.05,
        warmup=0.1,
        clip=1.0,
        layer_decay=0.75,
        label_smoothing=0.1,
        augment=Augment(scale=(0.4, 1.0)),
    ),
}
