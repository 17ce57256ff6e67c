"""Every public architecture that vitkit should load: compared with its own library, or refused with the reason.

    python -m benchmarks.proof                        # all cases, one after another
    python -m benchmarks.proof --only 'timm eva'      # those whose library, module or name contain these words
    python -m benchmarks.proof --json proof.json      # rows as JSON, continued if the file exists
    python -m benchmarks.proof --page docs/proof.md   # rows as a page

Models have their full width, two blocks, a grid of 3 x 2 patches and random weights in which no tensor is zero, so that
every tensor matters. A row says: the largest difference of the outputs relative to the largest output, how far rows of
the attention are from summing to one, whether our file equals the library's tensor by tensor, and whether the count of
parameters is the library's. `CASES` lists what makes cases; add a function to it for another library.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families import CLASSES, Class
from vitkit.checkpoints import load, open_checkpoint, save
from vitkit.checkpoints.dialects import to_dialect
from vitkit.checkpoints.verify import peer
from vitkit.errors import VitkitError
from vitkit.model.count import parameters
from vitkit.model.vit import ViT

BAR = 1e-5  # relative to the largest output, in fp32
GRID = (3, 2)


@dataclass(frozen=True)
class Row:
    """What was found for one architecture.

    Args:
        library: whose it is.
        module: where the library keeps it.
        name: what the library calls it.
        verdict: `equal`, `different`, `refused`, or `not built` if the library itself failed.
        difference: largest difference of the outputs, relative to the largest output.
        attention: largest distance of a row of A from summing to one.
        round_trip: whether the file that we write equals the library's tensor by tensor.
        parameters: whether our count of parameters, from the configuration alone, is the library's.
        words: why it was refused, or what the round trip changes.
    """

    library: str
    module: str
    name: str
    verdict: str
    difference: float | None = None
    attention: float | None = None
    round_trip: bool | None = None
    parameters: bool | None = None
    words: str = ""


@dataclass(frozen=True)
class Case:
    """One architecture.

    Args:
        library: whose it is.
        module: where the library keeps it.
        name: what the library calls it.
        build: returns the library's model, in eval mode, with random weights.
        save: writes it to a folder as the library does, or as its users do.
        dialect: our dialect for its files.
        outputs: (the library's model, pixels) -> what our logits or features are compared with.
    """

    library: str
    module: str
    name: str
    build: Callable[[], nn.Module]
    save: Callable[[nn.Module, Path], object]
    dialect: str
    outputs: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)

    def row(self, folder: Path, **found: Any) -> Row:
        """Build, save, load, compare."""
        said = {"library": self.library, "module": self.module, "name": self.name}
        try:
            theirs = self.build()
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            return Row(**said, verdict="not built", words=f"{type(error).__name__}: {str(error)[:200]}")
        self.save(theirs, folder)
        try:
            ours = load(folder)
        except VitkitError as error:
            return Row(**said, verdict="refused", words=str(error))
        x = torch.randn(2, 3, *ours.config.image_hw, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            expected, A = self.outputs(theirs, x), ours.attention(x)
            difference = float((ours(x) - expected).abs().max() / expected.abs().max())
        if self.dialect:
            same, words = round_trip(ours, theirs.state_dict(), self.dialect)
        else:  # a class's file may hold more than the model; what is left has to come back
            same, words = through_files(ours, folder)
        return Row(
            **said,
            verdict="equal" if difference <= BAR else "different",
            difference=difference,
            attention=max(float((layer.sum(-1) - 1).abs().max()) for layer in A.values()),
            round_trip=same,
            parameters=parameters(ours.config)
            == sum(p.numel() for p in (theirs if self.dialect else ours).parameters()),  # type: ignore[attr-defined]
            words=words,
        )


def round_trip(ours: ViT, tensors: dict[str, Tensor], dialect: str) -> tuple[bool, str]:
    """Whether our file equals the library's tensor by tensor, and if not, where it differs."""
    try:
        written = to_dialect(ours, dialect)
    except VitkitError as error:
        return False, str(error)
    other = sorted(set(written) ^ set(tensors))
    other += [name for name, t in written.items() if name in tensors and not torch.equal(t, tensors[name])]
    return not other, f"differs in what vitkit writes: {', '.join(other[:4])}" if other else ""


def through_files(ours: ViT, folder: Path) -> tuple[bool, str]:
    """Whether a model, written in the dialect of the folder that it came from and read again, is the same."""
    dialect = open_checkpoint(folder).dialect.name
    try:
        save(ours, folder / "again", dialect)
    except VitkitError as error:
        return False, str(error)
    back = load(folder / "again").state_dict()
    other = [name for name, tensor in ours.state_dict().items() if not torch.equal(tensor, back[name])]
    return not other, f"differs in what vitkit writes: {', '.join(other[:4])}" if other else ""


def page(rows: list[Row]) -> str:
    """Return docs/proof.md."""
    text = [HEAD]
    for library, module in dict.fromkeys((row.library, row.module) for row in rows if row.library == "timm"):
        here = [row for row in rows if (row.library, row.module) == (library, module)]
        text.append(f"## {library}: {module}\n\n{_counts(here)}\n\n{_table(here)}")
    here = [row for row in rows if row.library == "transformers"]
    text.append(f"## transformers\n\n{_counts(here)}\n\n{_table(here)}")
    return "\n".join(text)


def _counts(rows: list[Row]) -> str:
    of = Counter(row.verdict for row in rows)
    return f"{len(rows)} names: {', '.join(f'{count} {verdict}' for verdict, count in of.items())}."


def _table(rows: list[Row]) -> str:
    lines = ["| name | loads | largest difference | rows of A sum to one | round trip exact | why not |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        loads = {"equal": "equal", "different": "DIFFERENT"}.get(row.verdict, row.verdict)
        number = "" if row.difference is None else f"{row.difference:.1e}"
        sums = "" if row.attention is None else "yes" if row.attention < 1e-5 else f"off by {row.attention:.0e}"
        exact = "" if row.round_trip is None else "yes" if row.round_trip else "no"
        words = row.words.split(". ")[0].replace("|", "/").replace("\n", " ")
        lines.append(f"| {row.name} | {loads} | {number} | {sums} | {exact} | {words} |")
    return "\n".join(lines) + "\n"


HEAD = """# Proof

Every architecture of timm's plain Vision Transformers and every class of transformers' that vitkit reads, each compared
with its own library. `python -m benchmarks.proof --page docs/proof.md` made this page.

timm's models have their full width, two blocks, a grid of 3 x 2 patches and random weights in which no tensor is zero.
transformers' classes are tiny models with random weights, saved by their own `save_pretrained`. The largest difference
is that of the outputs, relative to the largest output, in float32; two orders of summation differ by about 1e-6. A
round trip is exact if what vitkit writes has the same tensors to the bit. Where it differs in what vitkit writes, timm
keeps positions for registers or for DeiT's distillation token; vitkit adds them to these tokens and writes zeros, which
gives the same outputs in timm. A name is refused if vitkit lacks a part of it, and not built if the library itself
cannot make such a small model of it.
"""


def perturbed(model: nn.Module) -> nn.Module:
    """Add noise to every parameter, in place, so that none is zero or one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(std=0.05, generator=generator))
    return model.eval()


def timm_model(name: str, depth: int = 2) -> nn.Module:
    """timm's model of a name: full width, `depth` blocks, a grid of 3 x 2 patches."""
    patch = int((re.search(r"(?:patch|_s)(\d+)", name) or ["", "16"])[1]) * (2 if "_p8" in name else 1)
    size = (GRID[0] * patch, GRID[1] * patch)
    options: dict[str, Any] = {"num_kv_heads": 4} if "sapiens2" in name else {}  # listed for the full depth
    overlay = {"input_size": (3, *size)}
    return perturbed(
        peer("timm").create_model(name, depth=depth, img_size=size, pretrained_cfg_overlay=overlay, **options)
    )


def timm_save(model: nn.Module, folder: Path) -> None:
    """Write a folder as timm pushes it to the hub."""
    peer("timm").models.save_for_hf(model, folder, safe_serialization=True)


def timm_cases() -> Iterator[Case]:
    """timm's plain Vision Transformers."""
    for module in ("vision_transformer", "deit", "eva", "beit", "vision_transformer_hybrid"):
        for name in peer("timm").list_models(module=module):
            yield Case("timm", module, name, lambda name=name: timm_model(name), timm_save, "timm")  # type: ignore[misc]


def transformers_cases() -> Iterator[Case]:
    """transformers' classes, each as a tiny model: their configurations are free, so no name stands for a width."""
    for name, kind in CLASSES.items():

        def build(kind: Class = kind) -> nn.Module:
            library = peer("transformers")
            library.utils.logging.set_verbosity_error()
            library.utils.logging.disable_progress_bar()
            return kind.make(library)  # type: ignore[no-any-return]

        def keep(model: Any, folder: Path) -> None:
            model.save_pretrained(folder)

        def outputs(model: nn.Module, x: Tensor, kind: Class = kind) -> Tensor:
            found, tokens, _ = kind.answer(model, x)
            if found is not None:
                return found
            assert tokens is not None  # every class has one of the two
            without = 1 if "Data2Vec" in kind.kind else 0  # tokens that are not patches
            return tokens[:, 0] if kind.kind.startswith("ViTM") else tokens[:, without:].mean(1)

        yield Case("transformers", kind.kind.split("For")[0].removesuffix("Model"), name, build, keep, "", outputs)


CASES: tuple[Callable[[], Iterator[Case]], ...] = (timm_cases, transformers_cases)


def cases(only: str = "") -> Iterator[Case]:
    """Yield the cases whose library, module or name contain every one of these words."""
    for make in CASES:
        for case in make():
            if all(word in f"{case.library} {case.module} {case.name}" for word in only.split()):
                yield case


def main() -> None:
    """Run the cases, one model at a time, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Words that library, module or name must contain (default: all).")
    parser.add_argument("--page", type=Path, help="File for the rows as a page of tables (default: none).")
    parser.add_argument("--json", type=Path, help="File for the rows; rows that it has are kept (default: none).")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = (
        [Row(**row) for row in json.loads(options.json.read_text())] if options.json and options.json.exists() else []
    )
    done = {(row.library, row.name) for row in rows}
    for case in cases(options.only):
        if (case.library, case.name) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(case.row(Path(folder)))
        gc.collect()  # one model at a time: some are large
        row = rows[-1]
        number = "" if row.difference is None else f"{row.difference:.1e}"
        print(f"{row.library} {row.name}: {row.verdict} {number} {row.words[:160]}".rstrip(), flush=True)
        if options.json:
            options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if options.page:
        options.page.write_text(page(rows), encoding="utf-8")
    for (library, module), count in Counter((row.library, row.module) for row in rows).items():
        of = Counter(row.verdict for row in rows if (row.library, row.module) == (library, module))
        print(f"{library} {module}: {count} names, {', '.join(f'{n} {verdict}' for verdict, n in of.items())}")


if __name__ == "__main__":
    main()
