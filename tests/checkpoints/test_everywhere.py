"""Commands on models of other families, as transformers saves them: probe, explain, serve and export."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.families import CLASSES
from benchmarks.fuzz_serve import multipart, picture, request, send, serving, wait_for
from tests.checkpoints.test_cli import vitkit  # noqa: F401
from tests.peers import peer
from vitkit.checkpoints import load


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["CLIPVisionModelWithProjection", "SiglipVisionModel", "DINOv3ViTModel", "BeitForImageClassification"]
)
def test_commands(name: str, vitkit: Any, tmp_path: Path) -> None:  # noqa: F811
    CLASSES[name].make(peer("transformers")).save_pretrained(tmp_path / "weights")
    run, cache = tmp_path / "run", tmp_path / "cache"
    how = ("--from", tmp_path / "weights", "--out", run, "--cache", cache, "--method", "ridge", "--workers", 0)
    code, _, err = vitkit("probe", "digits", *how)
    assert code == 0, err
    assert load(run).config.num_classes == 10
    assert (run / "report.html").is_file(), err
    code, out, err = vitkit("figures", run, "--out", tmp_path / "figures")
    assert code == 0, err
    assert ("positions" in out) is (load(run).config.positions == "1d")  # DINOv3 and BEiT add none to a token
    Image.effect_noise((60, 40), 80).convert("RGB").save(tmp_path / "photo.png")
    code, _, err = vitkit("explain", run, tmp_path / "photo.png", "--out", tmp_path / "maps")
    assert code == 0, err
    with np.load(tmp_path / "maps" / "photo" / "arrays.npz") as arrays:
        assert all(np.isfinite(arrays[key]).all() for key in arrays.files if arrays[key].dtype.kind == "f")
    code, out, err = vitkit("export", run, "--to", "onnx", "--out", tmp_path / "a.onnx")
    assert code == 0, err
    assert "promised 1e-05: kept" in out
    with serving(run) as (_, port):
        wait_for(port)
        body, headers = multipart(picture(random.Random(0), "PNG"))
        answer = send(port, request("POST", "/v1/predict", body, headers))
    assert answer.status == 200
    assert len(json.loads(answer.body)["results"][0]["top"]) > 1
