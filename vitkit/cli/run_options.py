"""The options of a training run, declared once: commands that train name the ones that they have.

RECIPE      fields of Recipe -> their options
SETTINGS    fields of Settings -> their options
run_options gives a command such options; it receives them as the dicts `changes` and `settings`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import collect

of_machine = partial(typer.Option, rich_help_panel="The machine")

of_teacher = partial(typer.Option, rich_help_panel="Changes to the recipe")


def of_recipe(name: str, help: str, **more: Any) -> Any:
    """Declare an option that changes one number of the recipe."""
    text = f"{help.removesuffix('.')} (default: the recipe's)."
    return typer.Option(name, rich_help_panel="Changes to the recipe", help=text, **more)


def whole_or_auto(text: str, option: str) -> int | str:
    """Parse `32` or `auto`."""
    from vitkit.errors import ConfigError

    if text != "auto" and not text.isdecimal():
        raise ConfigError(f"{option} must be a whole number or auto; got {text!r}.")
    return text if text == "auto" else int(text)


Out = Annotated[Path | None, typer.Option("--out", help="Folder for the run, which must not exist yet (required).")]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field of the new model, such as hidden_size=256; repeat for several (default: none).",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run at --out.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, without training.")]
RunReport = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html at the end (default: yes).")]
RunSize = Annotated[
    str | None,
    typer.Option("--image-size", help="Image size in pixels: 384, or 384x512 (default: the recipe's or the model's)."),
]

RECIPE: dict[str, Any] = {
    "val": Annotated[
        float | None,
        typer.Option(
            "--val",
            help="Share of train to hold out if there is no val folder; 0 holds out none (default: the recipe's).",
        ),
    ],
    "target": Annotated[
        str | None,
        of_recipe(
            "--target",
            help="What to predict of a hidden patch: mean (its mean colour of 3 bits per channel), 4x4 (4 x 4 such "
            "colours) or patch (every pixel, by regression).",
        ),
    ],
    "images": Annotated[
        float | None, of_recipe("--images", help="Number of training images to use or, below 1, their share.")
    ],
    "epochs": Annotated[float | None, of_recipe("--epochs", help="Passes over the training data.")],
    "steps": Annotated[int | None, of_recipe("--steps", help="Number of updates, instead of --epochs.")],
    "batch_size": Annotated[
        str | None,
        of_recipe(
            "--batch-size",
            help="Images per update, over all processes; auto keeps the recipe's, and computes as many images at a "
            "time as memory allows.",
            metavar="INTEGER|auto",
        ),
    ],
    "lr": Annotated[float | None, of_recipe("--lr", help="Base learning rate.")],
    "lr_rule": Annotated[
        str | None, of_recipe("--lr-rule", help="How lr follows another --batch-size: fixed, linear or sqrt.")
    ],
    "warmup": Annotated[
        float | None, of_recipe("--warmup", help="Warm-up steps; a value below 1 is a share of the run.")
    ],
    "weight_decay": Annotated[
        float | None, of_recipe("--weight-decay", help="Decoupled weight decay of kernels, relative to lr.")
    ],
    "optimizer": Annotated[str | None, of_recipe("--optimizer", help="Optimizer: adamw, adam, sgd or muon.")],
    "decay": Annotated[str | None, of_recipe("--decay", help="Shape of the lr schedule: linear, cosine or constant.")],
    "final_lr": Annotated[float | None, of_recipe("--final-lr", help="Learning rate at the end of the decay.")],
    "clip": Annotated[float | None, of_recipe("--clip", help="Largest global norm of the gradient.")],
    "ema": Annotated[
        float | None, of_recipe("--ema", help="Decay of the running average of the weights, such as 0.9999.")
    ],
    "layer_decay": Annotated[
        float | None, of_recipe("--layer-decay", help="lr of each layer relative to the layer above.")
    ],
    "loss": Annotated[str | None, of_recipe("--loss", help="Loss: softmax or sigmoid.")],
    "label_smoothing": Annotated[
        float | None, of_recipe("--label-smoothing", help="Share of each target spread over all classes.")
    ],
    "class_weights": Annotated[
        str | None,
        of_recipe(
            "--class-weights",
            help="Weights of the classes in the loss: equal, or balanced (an image of a rare class counts more).",
        ),
    ],
    "sampling": Annotated[
        str | None,
        of_recipe(
            "--sampling",
            help="How images are drawn: uniform (each once per epoch), or balanced (every class equally often).",
        ),
    ],
    "augment_on": Annotated[
        str | None,
        of_recipe(
            "--augment-on",
            help="Where images are augmented: cpu, or device (for images of one size in memory, such as idx:DIR).",
        ),
    ],
    "teacher": Annotated[
        str | None,
        of_recipe(
            "--teacher",
            help="Weights whose answers are learnt besides the labels: a run, a file or a hub id of the same classes.",
        ),
    ],
    "teacher_share": Annotated[
        float | None, of_teacher("--teacher-share", help="Share of the teacher's answers in the loss (default: 0.9).")
    ],
    "teacher_temperature": Annotated[
        float | None,
        of_teacher(
            "--teacher-temperature",
            help="What both models' logits are divided by before they are compared (default: 4).",
        ),
    ],
    "early_stop": Annotated[
        int | None,
        of_recipe("--early-stop", help="Stop after N validations in a row without a better one; the best is kept."),
    ],
    "dropout": Annotated[float | None, of_recipe("--dropout", help="Dropout rate of dense layers.")],
    "drop_path": Annotated[float | None, of_recipe("--drop-path", help="Stochastic-depth rate of the last block.")],
    "freeze": Annotated[
        list[str] | None,
        of_recipe("--freeze", help="Parameters to freeze: a name or a pattern such as 'blocks.0.*'. Repeatable."),
    ],
    "from_probe": Annotated[
        bool | None,
        of_recipe("--from-probe", help="Start the head from logistic regression on frozen features, not from zeros."),
    ],
    "lora": Annotated[
        int | None,
        of_recipe(
            "--lora",
            help="Rank of low-rank adapters on qkv and MLP, such as 8; only they and the head are trained.",
        ),
    ],
}
SETTINGS: dict[str, Any] = {
    "seed": Annotated[int | None, typer.Option("--seed", help="Random seed (default: 0).")],
    "precision": Annotated[
        str | None,
        of_machine("--precision", help="fp32, or mixed precision: bf16, fp16 or, on CUDA, fp8 (default: fp32)."),
    ],
    "device": Annotated[
        str | None, of_machine("--device", help="Device: auto, cpu, cuda, cuda:1 or mps (default: auto).")
    ],
    "micro_batch": Annotated[
        str | None,
        of_machine(
            "--micro-batch",
            metavar="INTEGER|auto",
            help="Most images per forward pass, or auto; gradients are added up over the batch (default: all at once).",
        ),
    ],
    "workers": Annotated[
        int | None, of_machine("--workers", help="Worker processes for decoding (default: one per core).")
    ],
    "bad_images": Annotated[
        str | None, of_machine("--bad-images", help="What to do about unreadable images: fail or skip (default: fail).")
    ],
    "compile": Annotated[bool | None, of_machine("--compile", help="Use torch.compile (default: off).")],
    "deterministic": Annotated[
        bool | None,
        of_machine("--deterministic", help="Use only bit-reproducible CUDA kernels, which are slower (default: off)."),
    ],
    "checkpointing": Annotated[
        bool | None,
        of_machine(
            "--checkpointing/--no-checkpointing",
            help="Recompute activations in the backward pass: less memory, more time (default: off; on with --shard).",
        ),
    ],
    "shard": Annotated[
        bool | None,
        of_machine(
            "--shard/--no-shard",
            help="Divide weights, gradients and moments over all processes, for large models (default: off).",
        ),
    ],
    "log_every": Annotated[int | None, of_machine("--log-every", help="Log metrics every N steps (default: 10).")],
    "evaluate_every": Annotated[
        int | None, of_machine("--evaluate-every", help="Validate every N steps (default: every epoch).")
    ],
    "save_every": Annotated[
        int | None,
        of_machine("--save-every", help="Save every N steps, besides each new best (default: at every validation)."),
    ],
    "trackers": Annotated[
        list[str] | None,
        of_machine("--tracker", help="Tracker: tensorboard, wandb, mlflow or none. Repeatable (default: tensorboard)."),
    ],
}
LABELLED = [name for name in RECIPE if name not in ("target", "images")]  # the fields that `vitkit train` offers


def run_options(recipe: Iterable[str], settings: Iterable[str] = SETTINGS) -> Callable[..., Callable[..., None]]:
    """Give a command options of a run; it receives what the user gave as the dicts `changes` and `settings`.

    Args:
        recipe: keys of RECIPE.
        settings: keys of SETTINGS (default: all).
    """
    tables = {"changes": {name: RECIPE[name] for name in recipe}, "settings": {n: SETTINGS[n] for n in settings}}
    parse: dict[str, Callable[[Any], Any]] = {
        "freeze": tuple,
        "trackers": lambda names: tuple(name for name in names if name != "none"),
        "batch_size": partial(whole_or_auto, option="--batch-size"),
        "micro_batch": partial(whole_or_auto, option="--micro-batch"),
    }
    return collect(tables, parse)
