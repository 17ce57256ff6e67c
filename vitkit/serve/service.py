"""A loaded model behind batchers: images in, answers out. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

import vitkit
from vitkit.checkpoints.reading import build, open_checkpoint
from vitkit.checkpoints.sidecar import sha256
from vitkit.cpu_features import check_type
from vitkit.data.preprocess import normalize
from vitkit.errors import Busy, ConfigError, InputError, pick
from vitkit.evaluation.names import class_names
from vitkit.evaluation.predict import Guess, Prediction
from vitkit.model.classifier import device_of
from vitkit.model.config import variant_of
from vitkit.model.count import parameters
from vitkit.model.vit import ViT
from vitkit.serve.batching import Batcher
from vitkit.serve.metrics import Metrics
from vitkit.serve.settings import Settings
from vitkit.serve.uploads import Upload, to_pixels
from vitkit.speed import ENGINES, chosen
from vitkit.speed.exported import Exported, is_exported, open_exported
from vitkit.types import Array

log = logging.getLogger("vitkit")
Job = Callable[[], Any]
T = TypeVar("T")
R = TypeVar("R")


class Service:
    """One model, ready to answer many at once.

    Args:
        model: where and in the precision it is to run; or an exported file, which only predicts.
        settings: the limits.
        engine: a row of `speed.ENGINES`, `speed.usual`'s when not given; runs predictions. Features and explanations
            come from the model itself.
        source: what the weights are called, for the card.
        sha256: of the file of weights, for the card.
        batcher: what gathers batches.
    """

    def __init__(
        self,
        model: ViT | Exported,
        settings: Settings | None = None,
        *,
        engine: str | None = None,
        source: str = "",
        sha256: str | None = None,
        batcher: type[Batcher[Any, Any]] = Batcher,
    ) -> None:
        self.model: Any = model.eval() if isinstance(model, ViT) else model
        self.settings = settings or Settings()
        self.engine = chosen(engine, model) if isinstance(model, ViT) else model.card.form
        self.source, self.sha256 = source, sha256
        self.spec, self.device = model.input_spec, device_of(model)
        self.dtype = model.patch_embedding.projection.weight.dtype if isinstance(model, ViT) else torch.float32
        self.names = class_names(model) if model.config.num_classes else ()
        check_type(self.device.type, self.dtype)
        self.forward = ENGINES[self.engine].build(model) if isinstance(model, ViT) else model
        self.metrics, self.batcher = Metrics(), batcher
        self.ready = self.stopping = False
        self.compute = threading.Lock()  # two batches at once would only fight for the same cores
        self.pool = ThreadPoolExecutor(self.settings.threads, thread_name_prefix="vitkit-decode")
        self.logits: Batcher[Tensor, Array] = self._batcher("predict", partial(self._run, self.forward))
        self.features: Batcher[Tensor, Array] = self._batcher("embed", partial(self._run, self._features))
        self.jobs: Batcher[Job, Any] = self._batcher("explain", lambda jobs: [job() for job in jobs], max_batch=1)

    def _batcher(
        self, work: str, run: Callable[[Sequence[T]], Sequence[R]], max_batch: int | None = None
    ) -> Batcher[T, R]:
        s = self.settings
        batcher = self.batcher(
            run,
            max_batch=max_batch or s.max_batch,
            max_delay=s.max_delay,
            max_queue=s.max_queue,
            observe=partial(self.metrics.batch, work),
        )
        self.metrics.waiting.labels(work).set_function(lambda: batcher.held)
        return batcher

    def _run(self, function: Callable[[Tensor], Tensor], images: Sequence[Tensor]) -> list[Array]:
        """One batch: [C, H, W] uint8 images -> one float32 array each."""
        with self.compute, torch.inference_mode():
            return list(function(self.normalized(torch.stack(list(images)))).float().cpu().numpy())

    def _features(self, x: Tensor) -> Tensor:
        features: Tensor = self.model.features(x)
        return features

    @property
    def explains(self) -> bool:
        """Whether it holds a model with all its parts; an exported file only predicts."""
        return isinstance(self.model, ViT)

    def need_model(self) -> None:
        """Refuse what an exported file cannot do."""
        if not self.explains:
            raise InputError(
                f"This server runs an exported file ({self.engine}), which only predicts; serve the "
                f"weights themselves for embeddings and explanations."
            )

    def normalized(self, x: Tensor) -> Tensor:
        """[B, C, H, W] uint8 as the model is fed: on its device, in its precision."""
        return normalize(x.to(self.device), self.spec).to(self.dtype)

    def warm(self) -> None:
        """Run what has to be run once (compiling, first allocations), for one image and for several; then be ready."""
        if self.ready:
            return
        blank = torch.zeros((len(self.spec.mean), *self.spec.size), dtype=torch.uint8)
        for size in sorted({1, min(2, self.settings.max_batch), self.settings.max_batch}):
            logits = self._run(self.forward, [blank] * size)
        if not np.isfinite(logits[0]).all():
            raise InputError(
                f"Expected finite logits; {self.source or 'the model'} gives NaN or infinity for a black "
                f"image. Use another precision, or other weights."
            )
        self.ready = True

    def admit(self) -> None:
        """Refuse while the model is warming up."""
        if not self.ready:
            raise Busy("The server is starting; try again in 5 s.")

    async def pixels(self, uploads: Sequence[Upload]) -> list[Tensor]:
        """Decode and resize off the event loop; the first image that cannot be read is the answer."""
        loop = asyncio.get_running_loop()
        found = await asyncio.gather(
            *(loop.run_in_executor(self.pool, to_pixels, one, self.spec, self.settings) for one in uploads),
            return_exceptions=True,
        )
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return [result for result in found if isinstance(result, Tensor)]

    async def _answers(
        self, batcher: Batcher[T, R], uploads: Sequence[Upload], items: Callable[[list[Tensor]], Sequence[T]]
    ) -> list[R]:
        self.admit()
        with batcher.reserve(len(uploads)) as room:
            try:
                async with asyncio.timeout(self.settings.answer_seconds):
                    waiting = [room.submit(item) for item in items(await self.pixels(uploads))]
                    return await asyncio.gather(*(asyncio.wrap_future(one) for one in waiting))
            except TimeoutError:
                raise Busy(
                    f"No answer within {self.settings.answer_seconds:g} s: the server is overloaded. "
                    f"Try again in {batcher.patience()} s."
                ) from None

    async def predict(self, uploads: Sequence[Upload], top: int) -> list[Prediction]:
        """The likeliest classes of each image.

        Args:
            uploads: the images.
            top: how many classes.
        """
        if not self.model.config.num_classes:
            raise InputError("This model has no head (num_classes=0), so it names no classes; use /v1/embed.")
        logits = await self._answers(self.logits, uploads, list)
        found = torch.from_numpy(np.stack(logits)).double().softmax(1).numpy()  # [images, K]
        best = np.argsort(-found, axis=1, kind="stable")[:, :top]
        return [
            Prediction(one.name, tuple(Guess(self.names[k], int(k), float(p[k])) for k in row))
            for one, p, row in zip(uploads, found, best)
        ]

    async def embed(self, uploads: Sequence[Upload]) -> list[Array]:
        """y of Eq. 4, [D], of each image."""
        self.need_model()
        return await self._answers(self.features, uploads, list)

    async def explain(self, upload: Upload, job: Callable[[ViT, Tensor], T]) -> T:
        """Run a job of (model, pixels [1, C, H, W]) on one image, one job at a time."""
        self.need_model()

        def one(x: Tensor) -> T:
            with self.compute:
                return job(self.model, self.normalized(x[None]))

        return (await self._answers(self.jobs, [upload], lambda xs: [partial(one, xs[0])]))[0]

    def close(self) -> None:
        """Answer everything that was accepted, then end the threads."""
        for batcher in (self.logits, self.features, self.jobs):
            batcher.close()
        self.pool.shutdown()

    def card(self) -> dict[str, Any]:
        """What the model is: what a client needs to use it, and to know which one answered."""
        c, s = self.model.config, self.settings
        spec = {name: value for name, value in self.spec.to_dict().items() if name != "class_names"}
        return {
            "source": self.source,
            "sha256": self.sha256,
            "variant": variant_of(self.model.config) or None,
            "vitkit": vitkit.__version__,
            "parameters": parameters(c),
            "engine": self.engine,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "classes": list(self.names),
            "input_spec": spec,
            "patch_size": c.patch_size,
            "grid": [-(-side // c.patch_size) for side in self.spec.size],
            "layers": c.num_hidden_layers,
            "heads": [list(c.heads_of(layer)) for layer in range(c.num_hidden_layers)],
            "width": c.hidden_size,
            "prefix_tokens": c.num_prefix_tokens,
            "pool": c.pool,
            "limits": {"files": s.max_files, "megabytes": s.max_megabytes, "megapixels": s.max_megapixels},
        }


def load_service(
    source: str | Path,
    settings: Settings | None = None,
    *,
    engine: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    batcher: type[Batcher[Any, Any]] = Batcher,
    **overrides: Any,
) -> Service:
    """Load weights and put them behind batchers.

    Args:
        source: whatever `vitkit.load` takes: a file, a run folder, a hub id; or a file that `vitkit export` wrote.
        settings: the limits.
        engine: a row of `speed.ENGINES`; the usual one when not given.
        device: `cpu`, `cuda`, ...; None or `auto` for the accelerator of this machine, else the CPU.
        dtype: type of the weights; the file's own when not given.
        batcher: what gathers batches.
        overrides: whatever else `vitkit.load` takes (`image_size`, `mean`, `std`, ...).
    """
    if engine is not None:
        pick(ENGINES, engine, "engine")  # told before gigabytes are read
    if is_exported(source):
        size = overrides.pop("image_size", None)
        changes = {name: value for name, value in overrides.items() if value is not None}
        return Service(
            open_exported(source).feed(size, **changes),
            settings,
            source=str(source),
            sha256=sha256(Path(source)),
            batcher=batcher,
        )
    checkpoint = open_checkpoint(source, **overrides)
    for note in checkpoint.notes:
        log.warning("%s: %s", checkpoint.files.label, note)
    try:
        model = build(checkpoint, dtype, torch.device(device) if device not in (None, "auto") else best_device())
    except (RuntimeError, AssertionError) as error:  # torch's words for a device that is not there
        raise ConfigError(
            f"Cannot run on device {device!r} ({str(error).splitlines()[0]}). Use cpu, cuda or mps."
        ) from None
    return Service(
        model,
        settings,
        engine=engine,
        source=checkpoint.files.label,
        sha256=sha256(checkpoint.files.weights),
        batcher=batcher,
    )


def best_device() -> torch.device:
    """The accelerator of this machine, else the CPU."""
    return (
        torch.accelerator.current_accelerator() or torch.device("cpu")
        if torch.accelerator.is_available()
        else torch.device("cpu")
    )
