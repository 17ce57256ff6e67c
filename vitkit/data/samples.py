"""Two real photos that come with scikit-learn, for demos and figures."""

from __future__ import annotations

from PIL import Image

PHOTOS = ("china", "flower")


def sample_photo(name: str) -> Image.Image:
    """Return one of PHOTOS, 640 x 427 pixels."""
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image(f"{name}.jpg"))
