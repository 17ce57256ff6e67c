"""A loaded model behind batchers: images in, answers out. It knows nothing about HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
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
from vitkit.errors import Busy, ConfigError, InputError, VitkitError, pick
from vitkit.evaluation.names import class_names
from vitkit.evaluation.predict import Prediction, answer
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import device_of, probabilities
from vitkit.model.config import variant_of
from vitkit.model.count import parameters
from vitkit.model.known import Judged
from vitkit.model.resnet_config import ResNetConfig
from vitkit.model.vit import ViT
from vitkit.server.batching import Batcher
from vitkit.server.exploring import ExplorablePage
from vitkit.server.fair import LARGE, Budget, FairPool, Pace, lower_priority
from vitkit.server.metrics import Metrics
from vitkit.server.photos import Photos
from vitkit.server.settings import Settings
from vitkit.server.uploads import Upload, measure_all, to_pixels
from vitkit.speed import ENGINES, chosen
from vitkit.speed.exported import Exported, is_exported, open_exported
from vitkit.types import Array

log = logging.getLogger("vitkit")
Job = Callable[[], Any]
T = TypeVar("T")
R = TypeVar("R")


class Service:
    """One model that answers many clients at once.

    Args:
        model: a ViT or a ResNet on its device and in its precision, or an exported file, which can only predict.
        settings: the limits.
        engine: a row of `speed.ENGINES` for predictions (default: `speed.usual` chooses). Features and explanations
            always come from the model itself.
        source: name of the weights, for the model card.
        sha256: checksum of the weights file, for the model card.
        batcher: class that gathers batches.
    """

    def __init__(
        self,
        model: Backbone | Exported,
        settings: Settings | None = None,
        *,
        engine: str | None = None,
        source: str = "",
        sha256: str | None = None,
        batcher: type[Batcher[Any, Any]] = Batcher,
    ) -> None:
        self.model: Any = model.eval() if isinstance(model, Backbone) else model
        self.settings = settings or Settings()
        judged = isinstance(model, Backbone) and model.known is not None
        # Engines return no features, which "none of these" needs.
        self.engine = chosen("torch" if judged else engine, model) if isinstance(model, Backbone) else model.card.form
        self.source, self.sha256 = source, sha256
        self.photos: Photos | None = None  # set by whoever knows what the model was made with
        self.explorable: ExplorablePage | None = None  # set by whoever can make it
        self.spec, self.device = model.input_spec, device_of(model)
        self.dtype = next(model.parameters()).dtype if isinstance(model, Backbone) else torch.float32
        self.names = class_names(model) if model.config.num_classes else ()
        check_type(self.device.type, self.dtype)
        self.forward = ENGINES[self.engine].build(model) if isinstance(model, Backbone) else model
        if isinstance(model, Backbone) and judged:
            if engine not in (None, "torch"):
                raise ConfigError(f'Expected --engine torch for a model that answers "none of these"; got {engine!r}.')
            self.forward = Judged(model)
        self.judged = judged
        self.metrics, self.batcher = Metrics(), batcher
        self.ready = self.stopping = False
        self.untidy = False  # whether large requests may have left memory behind that nobody uses
        self.compute = threading.Lock()  # two batches at once would only compete for the same cores
        self.pace = Pace((os.cpu_count() or 1) / 6)
        self.pool = FairPool(self.settings.threads, self.pace)
        most = self.settings.max_request_megapixels * 1e6
        self.budget = Budget(most, most / 200)
        self.logits: Batcher[Tensor, Array] = self._batcher("predict", partial(self._run, self.forward))
        self.features: Batcher[Tensor, Array] = self._batcher("embed", partial(self._run, self._features))
        # At a low priority: an explanation takes as long as many predictions, which go first on busy processors.
        self.jobs: Batcher[Job, Any] = self._batcher(
            "explain", lambda jobs: [job() for job in jobs], max_batch=1, start=lower_priority
        )

    def _batcher(
        self,
        work: str,
        run: Callable[[Sequence[T]], Sequence[R]],
        max_batch: int | None = None,
        start: Callable[[], None] = lambda: None,
    ) -> Batcher[T, R]:
        s = self.settings
        sizes, times = self.metrics.batch_size.labels(work), self.metrics.batch_seconds.labels(work)

        def observe(size: int, seconds: float) -> None:
            sizes.observe(size)
            times.observe(seconds)

        batcher = self.batcher(
            run,
            max_batch=max_batch or s.max_batch,
            max_delay=s.max_delay,
            max_queue=s.max_queue,
            observe=observe,
            start=start,
        )
        self.metrics.waiting.labels(work).set_function(lambda: batcher.held)
        return batcher

    def _run(self, function: Callable[[Tensor], Tensor], images: Sequence[Tensor]) -> list[Array]:
        """Run one batch: [C, H, W] uint8 images -> one float32 array per image."""
        with self.compute, torch.inference_mode():
            return list(function(self.normalized(torch.stack(list(images)))).float().cpu().numpy())

    def _features(self, x: Tensor) -> Tensor:
        features: Tensor = self.model.features(x)
        return features

    @property
    def embeds(self) -> bool:
        """Whether it has features; an exported file can only predict."""
        return isinstance(self.model, Backbone)

    @property
    def explains(self) -> bool:
        """Whether it can show attention; an exported file can only predict, and a ResNet has no attention."""
        return isinstance(self.model, ViT)

    def need_model(self) -> None:
        """Raise InputError if the model is an exported file."""
        if not self.embeds:
            raise InputError(
                f"This server runs an exported file ({self.engine}), which can only predict. Serve the weights "
                f"themselves for embeddings and explanations."
            )

    def normalized(self, x: Tensor) -> Tensor:
        """[B, C, H, W] uint8 -> the model's input, on its device and in its precision."""
        return normalize(x.to(self.device), self.spec).to(self.dtype)

    def warm(self) -> None:
        """Run the model once per batch size, so that no client waits for compilation and first allocations."""
        if self.ready:
            return
        blank = torch.zeros((len(self.spec.mean), *self.spec.size), dtype=torch.uint8)
        for size in sorted({1, min(2, self.settings.max_batch), self.settings.max_batch}):
            logits = self._run(self.forward, [blank] * size)
        if not np.isfinite(logits[0]).all():
            raise InputError(
                f"Expected finite logits; {self.source or 'the model'} returns NaN or infinity for a black "
                f"image. Use another precision or other weights."
            )
        self.ready = True

    async def _answers(
        self, batcher: Batcher[T, R], uploads: Sequence[Upload], items: Callable[[list[Tensor]], Sequence[T]]
    ) -> list[R | VitkitError]:
        """Decode images in threads, and run them in the batcher; an image that is refused has its error as its result.

        Raises:
            VitkitError: the request as a whole is refused, or its only image is.
        """
        if not self.ready:
            raise Busy("The server is starting; try again in 5 s.")
        client = uploads[0].client
        with batcher.reserve(len(uploads)) as submit:
            try:
                async with asyncio.timeout(self.settings.answer_seconds):
                    measuring = self.pool.submit(client, 0, partial(self._measure, uploads))
                    found: list[Any] = await asyncio.wrap_future(measuring)  # of each image its size, pixels, result
                    places = [i for i, one in enumerate(found) if isinstance(one, int)]
                    total = sum(found[i] for i in places)
                    if total > LARGE:
                        submit.expect(0)  # others need not wait for images that take long to decode
                    with self.budget.reserve(client, total):
                        decoding = (
                            self.pool.submit(client, found[i], partial(to_pixels, uploads[i], self.spec))
                            for i in places
                        )
                        decoded = await asyncio.gather(*map(asyncio.wrap_future, decoding), return_exceptions=True)
                    self.untidy |= total > LARGE
                    for i, one in zip(places, decoded, strict=True):
                        if isinstance(one, BaseException) and not isinstance(one, VitkitError):
                            raise one
                        found[i] = one
                    if len(found) == 1 and isinstance(found[0], VitkitError):
                        raise found[0]
                    places = [i for i, one in enumerate(found) if isinstance(one, Tensor)]
                    running = (asyncio.wrap_future(submit(item)) for item in items([found[i] for i in places]))
                    for i, answer in zip(places, await asyncio.gather(*running), strict=True):
                        found[i] = answer
                    return found
            except TimeoutError:
                raise Busy(
                    f"No answer within {self.settings.answer_seconds:g} s: the server is overloaded. "
                    f"Try again in {batcher.retry_after()} s."
                ) from None

    def _measure(self, uploads: Sequence[Upload]) -> list[int | Tensor | VitkitError]:
        """Return what `measure_all` does; a single small image, whose client need not wait, is decoded at once."""
        sizes = measure_all(uploads, self.spec, self.settings)
        if len(sizes) == 1 and isinstance(sizes[0], int) and sizes[0] <= min(LARGE, self.budget.small):
            return [to_pixels(uploads[0], self.spec)]
        return list(sizes)

    async def predict(self, uploads: Sequence[Upload], top: int) -> list[Prediction | VitkitError]:
        """The most likely classes of each image, or why it cannot be classified.

        Args:
            uploads: the images.
            top: number of classes per image.
        """
        if not self.model.config.num_classes:
            raise InputError("This model has no classification head (num_classes=0). Use /v1/embed for its features.")
        rows = await self._answers(self.logits, uploads, list)
        return [
            row if isinstance(row, VitkitError) else self._prediction(one.name, row, top)
            for one, row in zip(uploads, rows, strict=True)
        ]

    def _prediction(self, name: str, row: Array, top: int) -> Prediction:
        """The prediction for logits [K], or [K + 1] with the distance to the known classes."""
        K = len(self.names)
        p = probabilities(torch.from_numpy(row[:K]), self.spec).numpy()
        return answer(name, p, self.names, self.spec, top, distance=float(row[K]) if self.judged else None)

    async def embed(self, uploads: Sequence[Upload]) -> list[Array | VitkitError]:
        """The features of each image, y of Eq. 4, [D], or why it has none."""
        self.need_model()
        return await self._answers(self.features, uploads, list)

    async def similar(self, uploads: Sequence[Upload], count: int) -> list[list[tuple[int, float]] | VitkitError]:
        """The numbers of the most similar photos of each image with their cosine similarities, or why there are none.

        Args:
            uploads: the images.
            count: photos per image.
        """
        if self.photos is None or not self.photos.searchable:
            raise InputError(
                "This server has no photos to compare with: it has them if it serves a run whose training photos are "
                "still in their place and whose features are in the cache, and its operator allows it."
            )
        rows = await self.embed(uploads)
        known = [row for row in rows if not isinstance(row, VitkitError)]
        found = iter(await asyncio.to_thread(self.photos.nearest, np.stack(known), count) if known else ())
        return [row if isinstance(row, VitkitError) else next(found) for row in rows]

    async def explain(self, upload: Upload, job: Callable[[ViT, Tensor], T]) -> T:
        """Run job(model, pixels [1, C, H, W]) for one image; jobs run one at a time, next to the predictions."""
        self.need_model()

        def one(x: Tensor) -> T:
            return self.pace.run(upload.client, lambda: job(self.model, self.normalized(x[None])))

        found = (await self._answers(self.jobs, [upload], lambda xs: [partial(one, xs[0])]))[0]
        assert not isinstance(found, VitkitError)  # one image that is refused raises
        return found

    def close(self) -> None:
        """Answer every accepted request, then end the threads."""
        for batcher in (self.logits, self.features, self.jobs):
            batcher.close()
        self.pool.shutdown()

    def card(self) -> dict[str, Any]:
        """The model card: what a client needs to use the model and to know which one answered."""
        c, s = self.model.config, self.settings
        spec = self.spec.preprocessing
        if isinstance(c, ResNetConfig):
            inside = {
                "patch_size": c.pixels,
                "grid": [-(-side // c.pixels) for side in self.spec.size],
                "layers": sum(c.depths),
                "heads": [],
                "width": c.width,
                "prefix_tokens": 0,
                "pool": "mean",
            }
        else:
            inside = {
                "patch_size": c.patch_size,
                "grid": [-(-side // c.patch_size) for side in self.spec.size],
                "layers": c.num_hidden_layers,
                "heads": [list(c.heads_of(layer)) for layer in range(c.num_hidden_layers)],
                "width": c.hidden_size,
                "prefix_tokens": c.num_prefix_tokens,
                "pool": c.pool,
            }
        return {
            "name": name_of(self.source),
            "source": self.source,
            "sha256": self.sha256,
            "variant": variant_of(self.model.config) or None,
            "vitkit": vitkit.__version__,
            "parameters": parameters(c),
            "engine": self.engine,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "classes": list(self.names),
            "several_labels": self.spec.several,
            "input_spec": spec,
            **inside,
            "limits": {
                "files": s.max_files,
                "megabytes": s.max_megabytes,
                "megapixels": s.max_megapixels,
                "request_megapixels": s.max_request_megapixels,
            },
        }


def name_of(source: str) -> str:
    """A short name for weights: of a run its folder, of a file its name without the ending, of the hub its id."""
    place, _, which = source.partition("@")
    path = Path(place)
    if not path.exists():
        return source
    name = path.resolve().name if path.is_dir() else path.stem
    return f"{name}@{which}" if which else name


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
        source: anything `vitkit.load` accepts (a file, a run folder, a hub id), or a file written by `vitkit export`.
        settings: the limits.
        engine: a row of `speed.ENGINES` (default: `speed.usual` chooses).
        device: `cpu`, `cuda`, ...; None or `auto` for this machine's accelerator, or the CPU if it has none.
        dtype: type of the weights (default: as in the file).
        batcher: class that gathers batches.
        overrides: any other arguments of `vitkit.load` (`image_size`, `mean`, `std`, ...).
    """
    if engine is not None:
        pick(ENGINES, engine, "engine")  # fail before gigabytes are read
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
    accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        model = build(checkpoint, dtype, accelerator if device in (None, "auto") else torch.device(device))
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device that does not exist
        raise ConfigError(
            f"Cannot run on device {device!r} ({str(error).splitlines()[0]}). Use --device auto."
        ) from None
    return Service(
        model,
        settings,
        engine=engine,
        source=checkpoint.files.label,
        sha256=sha256(checkpoint.files.weights),
        batcher=batcher,
    )
