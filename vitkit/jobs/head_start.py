"""A head to start from: logistic regression on the frozen features of the training images (`train --from-probe`)."""

from __future__ import annotations

import numpy as np

from vitkit.data.base import Source
from vitkit.features.embed import fill
from vitkit.features.head import attach
from vitkit.features.probe import Options, fit
from vitkit.jobs.embed import open_cache
from vitkit.model.backbone import Backbone
from vitkit.runtime import Runtime
from vitkit.training.build import new_head
from vitkit.training.settings import Settings


def head_from_probe(model: Backbone, train: Source, settings: Settings, runtime: Runtime) -> None:
    """Replace a model's head by the one that `vitkit probe` would fit to these images, in place.

    Args:
        model: the pre-trained model; it is moved to the runtime's device.
        train: the training part.
        settings: seed, workers, and what to do about unreadable images.
        runtime: device, precision and processes.
    """
    spec = model.input_spec
    new_head(model, train.class_names)
    model.input_spec = spec  # with the thresholds of several labels
    model.to(runtime.device)
    how = {"workers": settings.workers, "runtime": runtime, "bad_images": settings.bad_images}
    found = fill(model, train, open_cache(None), **how).read()  # type: ignore[arg-type]
    counts = found.labels.sum(0) if train.several else np.bincount(found.labels, minlength=len(train.class_names))
    single = int(counts.min()) < 2  # cannot be cross-validated
    options = Options(seed=settings.seed, strength=1.0 if single else None)
    head = fit("logistic", found.features, found.labels, train.class_names, options).head
    model.head.load_state_dict(attach(model, head, train.class_names, found.choice).head.state_dict())
