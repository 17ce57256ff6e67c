"""Feed damaged and hostile files to the doors of vitkit, and count what survives.

    python -m benchmarks.fuzz images       [--count 100000] [--seed 0] [--jobs 1] [--seconds S] [--state images.json]
    python -m benchmarks.fuzz checkpoints  [--count 20000]  [--seed 0] [--jobs 1] [--seconds S] [--state cp.json]
    python -m benchmarks.fuzz runs         [--count 5000]   [--seed 0] [--jobs 1] [--seconds S] [--state runs.json]
    python -m benchmarks.fuzz exports      [--count 1000]   [--seed 0] [--jobs 1] [--seconds S] [--state exports.json]
    python -m benchmarks.fuzz http         [--seconds 600]  [--seed 0] [--state http.json]

Case N of a seed is always the same: a file of a small corpus with a few seeded mutations (bits, numbers, pieces cut,
doubled or taken from another file; values of JSON). A case survives if it is read, or refused with a VitkitError of
reasonable length. It is lost if it ends in another exception, kills or hangs its process (watchdog), or lets anything
run that is planted in it. The cases run in a child process, which is replaced after every batch; its memory must stay
flat, and nothing may be printed by the C libraries behind Pillow and PyTorch. --jobs sets the number of child processes
at a time. After --seconds no batch is begun; with --state, a stopped run continues with the batches that are missing.
The exit code is 1 if anything was lost, and 3 if cases are still to be tried. `http` is benchmarks/fuzz_http.py.

Coverage-guided fuzzing is optional: with atheris installed (`pip install 'vitkit[fuzz]'`), `--atheris` runs the same
doors under it, for --seconds or until the first input that fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.fuzz_runs import Runs
from benchmarks.mutations import mutate, mutate_json, text_of

LONGEST = 2000  # characters of an error message
BATCH = 1000  # cases per child process
PATIENCE = 60.0  # seconds without an answer after which a case counts as a hang
MEMORY = 16 * 2**30  # bytes of address space of a child
GROWTH = 200  # MB by which a child may grow after its first hundred cases


# Images


def pictures() -> dict[str, bytes]:
    """Return small images in every format and mode that matters."""
    rng = np.random.default_rng(0)
    base = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((48, 36), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray(rng.integers(0, 65536, (20, 24), dtype=np.uint16))
    kinds: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "rgb.jpg": (base, {"exif": exif}),
        "progressive.jpg": (base, {"progressive": True}),
        "gray.jpg": (base.convert("L"), {}),
        "cmyk.jpg": (base.convert("CMYK"), {}),
        "rgb.png": (base, {}),
        "rgba.png": (base.convert("RGBA"), {}),
        "palette.png": (base.convert("P"), {"transparency": 3}),
        "one.png": (base.convert("1"), {}),
        "deep.png": (deep, {}),
        "a.gif": (base, {"save_all": True, "append_images": [base.rotate(90), base.rotate(180)]}),
        "a.bmp": (base, {}),
        "palette.bmp": (base.convert("P"), {}),
        "lossy.webp": (base, {"exif": exif}),
        "lossless.webp": (base.convert("RGBA"), {"lossless": True}),
        "moving.webp": (base, {"save_all": True, "append_images": [base.rotate(90)]}),
        "plain.tif": (base, {}),
        "lzw.tif": (base, {"compression": "tiff_lzw"}),
        "deflate.tif": (base, {"compression": "tiff_adobe_deflate"}),
        "packbits.tif": (base, {"compression": "packbits"}),
        "jpeg.tif": (base, {"compression": "jpeg"}),
        "fax.tif": (base.convert("1"), {"compression": "group4"}),
        "pages.tif": (base, {"save_all": True, "append_images": [base], "compression": "tiff_lzw"}),
        "deep.tif": (deep, {"compression": "tiff_lzw"}),
        "float.tif": (base.convert("F"), {}),
        "a.avif": (base, {}),
        "a.ppm": (base, {}),
        "a.jp2": (base, {}),
        "a.ico": (base, {"sizes": [(16, 16), (32, 32)]}),
        "a.tga": (base, {"compression": "tga_rle"}),
        "a.eps": (base, {}),  # refused: its decoder would start Ghostscript
    }
    found = {}
    for name, (image, options) in kinds.items():
        with io.BytesIO() as file, contextlib.suppress(KeyError, OSError, ValueError):  # this Pillow may lack a format
            ending = name.rpartition(".")[2]
            kind = {"jpg": "JPEG", "tif": "TIFF", "jp2": "JPEG2000"}.get(ending, ending.upper())
            image.save(file, kind, **options)
            found[name] = file.getvalue()
    return found


class Images:
    """Mutated images through decoding for evaluation, for training, and for `vitkit doctor`."""

    count = 100_000

    def __init__(self, folder: Path) -> None:
        from vitkit import InputSpec

        self.corpus = pictures()
        self.names = sorted(self.corpus)
        self.spec = InputSpec(size=(32, 32), resize="crop", crop=0.9)

    def case(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        name = rng.choice(self.names)
        raw = mutate(self.corpus[name], rng, self.corpus[rng.choice(self.names)])
        return name, lambda: self.door(raw, name)

    def seeds(self) -> Iterator[tuple[str, bytes]]:
        yield from self.corpus.items()

    def take(self, data: bytes) -> None:
        self.door(data, "an image")

    def door(self, raw: bytes, name: str) -> None:
        from vitkit.data.decode import decode, header, region, upright_size
        from vitkit.data.doctor import describe
        from vitkit.data.preprocess import pixels
        from vitkit.errors import BadImage

        with contextlib.suppress(BadImage):
            describe(raw, name)
        with contextlib.suppress(BadImage):
            width, height = upright_size(header(raw, name))
            region(raw, name, (0, 0, max(width // 2, 1), max(height // 2, 1)), (8, 8), "rgb", 3)
        image = decode(raw, name)
        if image.width * image.height < 10**7 and max(image.size) < 1000 * min(image.size):
            pixels(image, self.spec, name)


# Checkpoints


class Planted:
    """Unpickled without care, it creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Checkpoints:
    """Mutated weights and JSON files through `vitkit.load`, and a forward pass if they load."""

    count = 20_000

    def __init__(self, folder: Path) -> None:
        import torch

        from vitkit import InputSpec, ViT, ViTConfig, save
        from vitkit.checkpoints import to_dialect

        self.ran = folder / "ran"
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        config = ViTConfig(**shape, image_size=32, patch_size=8, num_classes=5)
        torch.manual_seed(0)
        model = ViT(config, InputSpec(size=(32, 32), class_names=tuple("abcde")))
        places: list[tuple[Path, Path]] = []  # (what is loaded, the file that is changed)

        def add(name: str, dialect: str) -> Path:
            save(model, path := folder / name / (name if "." in name else ""), dialect)
            places.append((path, path))
            return path

        (folder / "n.safetensors").mkdir(parents=True, exist_ok=True)
        add("n.safetensors", "native")
        for name, dialect in (("t.pth", "timm"), ("v.pth", "torchvision"), ("c.pth", "course"), ("g.npz", "google")):
            (folder / name).mkdir(exist_ok=True)
            path = add(name, dialect)
            if (beside := path.with_name(f"{name}.vitkit.json")).exists():
                places.append((path, beside))
        save(model, folder / "hf", "huggingface")
        places += [(folder / "hf", folder / "hf" / name) for name in ("config.json", "preprocessor_config.json") * 2]
        places.append((folder / "hf", folder / "hf" / "model.safetensors"))
        tensors = {name: t.clone() for name, t in to_dialect(model, "timm").items()}
        (folder / "x").mkdir(exist_ok=True)
        for name, saved, modern in (
            ("legacy.pth", tensors, False),
            ("wrapped.pth", {"model": tensors, "args": argparse.Namespace(lr=1)}, True),
            ("bomb.pth", {**tensors, "bomb": Planted(self.ran)}, True),
            ("legacybomb.pth", {**tensors, "bomb": Planted(self.ran)}, False),
        ):
            torch.save(saved, folder / "x" / name, _use_new_zipfile_serialization=modern)
            places.append((folder / "x" / name, folder / "x" / name))
        np.savez_compressed(folder / "x" / "z.npz", **{n: t.numpy() for n, t in to_dialect(model, "google").items()})  # type: ignore[arg-type]
        places.append((folder / "x" / "z.npz", folder / "x" / "z.npz"))
        self._shards(model, folder / "s", places)
        self._timm(folder, tensors, places)
        self.places = places
        self.originals = {file: file.read_bytes() for _, file in places if file.is_file()}
        self.places = [(source, file) for source, file in places if file in self.originals]

    def _shards(self, model: Any, folder: Path, places: list[tuple[Path, Path]]) -> None:
        from safetensors.torch import save_file

        from vitkit.checkpoints import to_dialect

        folder.mkdir(exist_ok=True)
        tensors = to_dialect(model, "huggingface")
        weight_map = {}
        for part in range(2):
            names = list(tensors)[part::2]
            save_file({n: tensors[n].contiguous() for n in names}, folder / f"{part}.safetensors")
            weight_map |= dict.fromkeys(names, f"{part}.safetensors")
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
        places += [(folder, index), (folder, folder / "0.safetensors")]

    def _timm(self, folder: Path, tensors: dict[str, Any], places: list[tuple[Path, Path]]) -> None:
        from safetensors.torch import save_file

        (folder / "timm").mkdir(exist_ok=True)
        save_file(tensors, folder / "timm" / "model.safetensors")
        stated = {
            "architecture": "vit_tiny_patch16_224",
            "num_classes": 5,
            "num_features": 32,
            "global_pool": "token",
            "model_args": {"num_heads": 4, "img_size": 32},
            "pretrained_cfg": {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9},
        }
        (folder / "timm" / "config.json").write_text(json.dumps(stated), encoding="utf-8")
        places += [(folder / "timm", folder / "timm" / "config.json")] * 2

    def case(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        source, file = rng.choice(self.places)
        original = self.originals[file]
        if file.suffix == ".json" and rng.random() < 0.8:
            raw = text_of(mutate_json(json.loads(original), rng), rng)
        elif file.suffix == ".safetensors" and rng.random() < 0.5:
            size = int.from_bytes(original[:8], "little")
            head = json.loads(original[8 : 8 + size])
            if "vitkit" in head.get("__metadata__", {}) and rng.random() < 0.7:
                described = mutate_json(json.loads(head["__metadata__"]["vitkit"]), rng)
                head["__metadata__"]["vitkit"] = json.dumps(described)
            else:
                head = mutate_json(head, rng)
            text = text_of(head, rng)
            raw = len(text).to_bytes(8, "little") + text + original[8 + size :]
        else:
            raw = mutate(original, rng, self.originals[rng.choice(self.places)[1]])
        return f"{file.parent.name}/{file.name}", lambda: self.door(source, file, raw, original)

    def seeds(self) -> Iterator[tuple[str, bytes]]:
        for number, (_, file) in enumerate(self.places):
            yield file.name, bytes([number]) + self.originals[file]

    def take(self, data: bytes) -> None:
        """The first byte says which file the others replace."""
        source, file = self.places[(data[0] if data else 0) % len(self.places)]
        self.door(source, file, data[1:], self.originals[file])

    def door(self, source: Path, file: Path, raw: bytes, original: bytes) -> None:
        import torch

        from vitkit.checkpoints import load

        file.write_bytes(raw)
        try:
            model = load(source, num_attention_heads=4 if source.suffix in (".pth", ".npz") else None)
            config = model.config
            if config.num_patches <= 256 and config.num_channels <= 16 and config.patch_size <= 64:
                with torch.inference_mode():
                    model(torch.zeros(1, config.num_channels, *config.image_hw))
            del model
        finally:
            # A new file: the tensors of the old one may be mapped from it.
            file.unlink()
            file.write_bytes(original)
            if self.ran.exists():
                raise AssertionError("code from the file ran")


# Exports


class Exports:
    """Mutated ONNX and OpenVINO files through `open_exported`, and one image if they open."""

    count = 1000

    def __init__(self, folder: Path) -> None:
        import torch

        from vitkit import InputSpec, ViT, ViTConfig
        from vitkit.speed.exported import export

        config = ViTConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=8,
        )
        torch.manual_seed(0)
        model = ViT(config, InputSpec(size=(16, 16)))
        self.places: list[tuple[Path, Path]] = []
        for to, ending in (("onnx", "onnx"), ("openvino", "xml")):
            path = folder / f"m.{ending}"
            export(model, to, path)
            self.places.append((path, path))
        self.places.append((folder / "m.xml", folder / "m.bin"))
        self.originals = {file: file.read_bytes() for _, file in self.places}

    def case(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        source, file = rng.choice(self.places)
        raw = mutate(self.originals[file], rng, self.originals[rng.choice(self.places)[1]])
        return file.name, lambda: self.door(source, file, raw)

    def seeds(self) -> Iterator[tuple[str, bytes]]:
        for number, (_, file) in enumerate(self.places):
            yield file.name, bytes([number]) + self.originals[file]

    def take(self, data: bytes) -> None:
        self.door(*self.places[(data[0] if data else 0) % len(self.places)], data[1:])

    def door(self, source: Path, file: Path, raw: bytes) -> None:
        import torch

        from vitkit.speed.exported import open_exported

        file.write_bytes(raw)
        try:
            model = open_exported(source)
            if model.input_spec.size[0] <= 64 and model.input_spec.size[1] <= 64:
                model(torch.zeros(1, model.config.num_channels, *model.input_spec.size))
        finally:
            file.unlink()
            file.write_bytes(self.originals[file])


KINDS: dict[str, Callable[[Path], Any]] = {
    "images": Images,
    "checkpoints": Checkpoints,
    "runs": Runs,
    "exports": Exports,
}


# The child, which runs cases, and its parent, which watches it


def generator(kind: str, seed: int, number: int) -> random.Random:
    """Return the generator of one case."""
    return random.Random(f"{kind} {seed} {number}")


def resident() -> float:
    """Resident memory of this process in MB, or 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, AttributeError, ValueError):
        return 0.0


def run_cases(kind: str, seed: int, start: int, stop: int, say: Callable[[dict[str, Any]], None]) -> None:
    """Run the cases from `start` to `stop`, and report each of them.

    Args:
        kind: a row of KINDS.
        seed: chooses the cases, with their numbers.
        start: number of the first case.
        stop: number after the last.
        say: receives {"n", "file", "how", "mb"}; `how` is `read`, the name of a VitkitError, or `lost: ...`.
    """
    from vitkit.errors import VitkitError

    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzzed = KINDS[kind](Path(place))
        for number in range(start, stop):
            file, door = fuzzed.case(generator(kind, seed, number))
            say({"n": number, "file": file})
            try:
                door()
                how = "read"
            except VitkitError as error:
                how = type(error).__name__ if len(str(error)) < LONGEST else f"lost: a message of {len(str(error))}"
            except Exception as error:
                how = f"lost: {type(error).__name__}: {str(error)[:200]}"
            say({"n": number, "how": how, "mb": resident()})


def child(kind: str, seed: int, start: int, stop: int) -> None:
    """Run cases in this process and write a line of JSON for each; run by `watch`."""
    with contextlib.suppress(ImportError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import torch

    torch.set_num_threads(1)
    logging.getLogger("vitkit").setLevel(logging.ERROR)
    run_cases(kind, seed, start, stop, lambda line: print(json.dumps(line), flush=True))


def watch(kind: str, seed: int, start: int, stop: int, patience: float = PATIENCE) -> Iterator[dict[str, Any]]:
    """Run cases in child processes; yield {"n", "file", "how", "mb"} for each, also for those that kill their child."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    while start < stop:
        with (
            tempfile.TemporaryFile() as noise,
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fuzz", "child", kind, str(seed), str(start), str(stop)],
                stdout=subprocess.PIPE,
                stderr=noise,
                env=environment,
                text=True,
            ) as process,
        ):
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
            now: dict[str, Any] | None = None
            try:
                while True:
                    try:
                        line = lines.get(timeout=patience if now else 10 * patience)  # imports take long when busy
                    except queue.Empty:
                        process.kill()
                        if now is None:
                            raise RuntimeError(f"the child did not start within {10 * patience:g} s") from None
                        yield {**now, "how": f"lost: hangs ({patience:g} s)"}
                        start = now["n"] + 1
                        break
                    if line is None:
                        if process.wait() != 0 or start < stop:
                            noise.seek(0)
                            said = noise.read()[-300:].decode("utf-8", "replace")
                            if now is None:
                                raise RuntimeError(f"the child did not start: {said}")
                            yield {**now, "how": f"lost: killed its process ({process.returncode}) {said}"}
                            start = now["n"] + 1
                        break
                    found = json.loads(line)
                    now = {**(now or {}), **found}
                    if "how" in found:
                        start = found["n"] + 1
                        yield now
            finally:
                if process.poll() is None:
                    process.kill()
            noise.seek(0)
            if (said := noise.read().decode("utf-8", "replace").strip()) and now is not None:
                yield {"n": now["n"], "noise": said[-300:], "lines": said.count("\n") + 1}


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def fuzz(
    kind: str,
    count: int,
    seed: int,
    state: Path | None = None,
    show: Callable[[str], None] = print,
    *,
    jobs: int = 1,
    seconds: float = float("inf"),
) -> Any:
    """Run all cases of a kind, continuing from `state`; return the summary.

    Args:
        kind: a row of KINDS.
        count: number of cases in all.
        seed: chooses them.
        state: file that keeps the summary, so that a stopped run can continue (default: none).
        show: receives a line of progress now and then.
        jobs: child processes at the same time (default: 1).
        seconds: begin no batch after this time (default: never).
    """
    summary: dict[str, Any] = {
        **{"kind": kind, "seed": seed, "done": 0, "batches": [], "how": {}, "lost": [], "noise": 0, "growth": 0.0}
    }
    if state is not None and state.is_file():
        kept = json.loads(state.read_text(encoding="utf-8"))
        if (kept["kind"], kept["seed"]) != (kind, seed):
            raise SystemExit(f"{state} belongs to {kept['kind']}, seed {kept['seed']}; choose another --state.")
        summary = kept
    began, lock = time.monotonic(), threading.Lock()

    def batch(start: int, stop: int) -> None:
        """Run a batch of cases and add them to the summary; one that is interrupted is run again the next time."""
        if time.monotonic() - began > seconds:
            return
        how, lost, noise, growth, first = Counter[str](), list[dict[str, Any]](), 0, 0.0, 0.0
        for found in watch(kind, seed, start, stop):
            if "noise" in found:
                noise += found["lines"]
                show(f"printed by a library: {found['noise']}")
                continue
            bad = found["how"].startswith("lost")
            how["lost" if bad else found["how"]] += 1
            if bad:
                lost.append({key: found[key] for key in ("n", "file", "how")})
                show(f"LOST case {found['n']} ({found['file']}): {found['how']}")
            if "mb" in found:
                first = found["mb"] if found["n"] - start <= min(100, (stop - start) // 2) else first
                growth = max(growth, found["mb"] - first)
        with lock:
            summary["how"] = dict(Counter(summary["how"]) + how)
            summary["lost"] += lost
            summary["noise"] += noise
            summary["growth"] = max(summary["growth"], growth)
            summary["done"] += how.total()
            summary["batches"].append([start, stop])
            if state is not None:
                state.with_suffix(".part").write_text(json.dumps(summary, indent=1), encoding="utf-8")
                state.with_suffix(".part").replace(state)
            show(f"{summary['done']:,} of {count:,}, {time.monotonic() - began:.0f} s, {len(summary['lost'])} lost")

    finished = {number for start, stop in summary["batches"] for number in range(start, stop)}
    left = [number for number in range(count) if number not in finished]
    groups = [list(group) for _, group in itertools.groupby(left, lambda number: number // BATCH)]
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(batch, group[0], group[-1] + 1) for group in groups]
        try:
            for one in waiting:
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS, "http"])
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=None)
    parser.add_argument("--case", type=int, default=None, help="run this one case in this process")
    parser.add_argument("--atheris", action="store_true")
    given = parser.parse_args()
    if given.kind == "http":
        from benchmarks import fuzz_http

        sys.exit(fuzz_http.attack(given.seconds or 600, given.seed, given.state))
    seconds = given.seconds or float("inf")
    if given.atheris:
        return guided(given.kind, given.seed, seconds)
    if given.case is not None:
        with tempfile.TemporaryDirectory() as place:
            file, door = KINDS[given.kind](Path(place)).case(generator(given.kind, given.seed, given.case))
            print(file)
            return door()
    count = given.count or KINDS[given.kind].count  # type: ignore[attr-defined]
    summary = fuzz(given.kind, count, given.seed, given.state, jobs=given.jobs, seconds=seconds)
    total = sum(summary["how"].values())
    print(
        f"{given.kind}: {total:,} tried, {total - len(summary['lost']):,} survived, {len(summary['lost'])} lost; seed "
        f"{given.seed}; memory grew by at most {summary['growth']:.0f} MB in a process; {summary['noise']} lines "
        f"printed by libraries"
    )
    for name, often in sorted(summary["how"].items(), key=lambda item: -item[1]):
        print(f"  {name:20} {often:,}")
    sys.exit(1 if summary["lost"] or summary["growth"] > GROWTH else 3 if summary["done"] < count else 0)


def guided(kind: str, seed: int, seconds: float) -> None:
    """Run the doors under atheris, which mutates the corpus so that it reaches new code; ends at the first loss.

    Args:
        kind: a row of KINDS.
        seed: of atheris' own mutations.
        seconds: how long to run.
    """
    from vitkit.errors import VitkitError

    try:
        import atheris  # type: ignore[import-not-found]
    except ImportError:
        raise SystemExit("This needs atheris: pip install 'vitkit[fuzz]'") from None
    logging.getLogger("vitkit").setLevel(logging.ERROR)
    place = Path(tempfile.mkdtemp())  # atheris ends the process, so nothing after it runs
    (place / "corpus").mkdir()
    fuzzed = KINDS[kind](place)
    for number, (name, raw) in enumerate(fuzzed.seeds()):
        (place / "corpus" / f"{number:03d}-{name}").write_bytes(raw)

    def one(data: bytes) -> None:
        with contextlib.suppress(VitkitError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fuzzed.take(data)

    with contextlib.suppress(VitkitError):  # imports what the door needs, to be instrumented
        fuzzed.take(next(fuzzed.seeds())[1])
    for name, module in list(sys.modules.items()):
        for function in vars(module).values() if name.partition(".")[0] in ("vitkit", "PIL") else ():
            if isinstance(function, types.FunctionType) and function.__module__ == name:
                atheris.instrument_func(function)
    limits = (f"-max_total_time={int(min(seconds, 10**9))}", f"-seed={seed + 1}", "-max_len=100000", "-rss_limit_mb=0")
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={place}/", str(place / "corpus")], one)
    print(f"inputs that fail are kept in {place}", flush=True)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], *map(int, sys.argv[3:6]))
    else:
        main()
