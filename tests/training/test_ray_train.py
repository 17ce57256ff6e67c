"""Ray Train as the launcher of the same loop: two workers on the CPU, one of which is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.training.test_loop import distance
from tests.training.tiny import SETTINGS, run, tiny
from vitkit.training.run_folder import RunFolder

RECIPE = tiny(steps=12, batch_size=15)  # 7 and 8 images


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
def test_ray_train_starts_the_loop_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'vitkit[scale]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    out, lost = tmp_path / "two", tmp_path / "lost"
    settings = {name: value for name, value in SETTINGS.items() if name != "trackers"}

    def loop() -> None:
        import vitkit

        def die(event: dict) -> None:
            if event["event"] == "step" and event["step"] == 6 and not lost.exists():
                lost.touch()
                os._exit(1)

        vitkit.train(
            "digits", out, recipe=RECIPE, resume=True, watch=die, progress=False, report=False, trackers=(), **settings
        )

    ray.init(address="local", num_cpus=2, include_dashboard=False)
    try:
        TorchTrainer(
            loop,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(failure_config=FailureConfig(max_failures=1), storage_path=str(tmp_path / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    assert lost.exists()
    run(tmp_path / "one", RECIPE)
    one, two = RunFolder.open(tmp_path / "one"), RunFolder.open(out)
    assert two.info["processes"] == 2
    assert [row["step"] for row in one.metrics()] == [row["step"] for row in two.metrics()]
    assert distance(tmp_path / "one", out) < 1e-4
