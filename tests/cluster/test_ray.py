"""The same jobs on real Ray: a local cluster that all tests of this file share, and one whose machines die."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.cluster.samples import model, place
from vitkit.cluster import on_ray
from vitkit.data import open_source
from vitkit.errors import ConfigError, LostWorker
from vitkit.evaluation.logits import logits_of
from vitkit.jobs import on_ray as job
from vitkit.jobs.embed import parts_of

pytest.importorskip("ray", reason="ray is not installed: pip install 'vitkit[scale,data]'")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster with a GPU that is only a number, so that decoding and computing have actors of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(name, value)
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # or Ray kills actors where other programs take the memory
        import ray

        started = ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
        try:
            yield str(started.address_info["address"])
        finally:
            ray.shutdown()


def test_actors_apart_give_the_logits_of_one_machine(at: Path, cluster: str, tmp_path: Path) -> None:
    source, ticks = open_source(at / "photos", "all"), list[int]()
    done = job.run(
        "eval",
        model(),
        {"all": source},
        tmp_path / "out",
        batch_size=8,
        device="cpu",
        precision="fp32",
        apart=True,
        progress=ticks.append,
    )
    one = logits_of(model(), source, batch_size=8, bad_images="skip")
    rows = [row for shard in done.shards for row in pq.read_table(tmp_path / "out" / shard.name).to_pylist()]
    assert [row["name"] for row in rows] == list(source.names)
    assert np.array_equal(np.array([row["logits"] for row in rows if row["logits"]], np.float32), one.logits)
    assert [name for name, _ in done.skipped] == [name for name, _ in one.skipped] == ["bee/003.jpg"]
    assert sum(ticks) == 30
    assert (
        job.run(
            "eval", model(), {"all": source}, tmp_path / "out", batch_size=8, device="cpu", precision="fp32"
        ).computed
        == 0
    )


@pytest.mark.slow
def test_an_error_in_an_actor_is_one_sentence(at: Path, cluster: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^This machine has no device 'cuda'"):  # the GPU is only a number
        job.run("embed", model(), parts_of(at / "photos"), tmp_path / "out", device="cuda")


def test_a_cluster_that_fails_again_and_again_is_given_up(
    at: Path, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    starts: list[int] = []

    def lost(*given: object) -> Iterator[dict[str, object]]:
        starts.append(1)
        raise ray.exceptions.RayActorError()
        yield {}

    monkeypatch.setattr(on_ray, "_pipeline", lost)
    with pytest.raises(LostWorker, match=r"failed 3 times without finishing a shard .* start the same command again"):
        job.run("embed", model(), parts_of(at / "photos"), tmp_path / "out", device="cpu", precision="fp32")
    assert len(starts) == on_ray.ATTEMPTS


@pytest.mark.slow
def test_the_command_on_the_cluster_that_ray_address_names(at: Path, cluster: str, tmp_path: Path) -> None:
    words = ["eval", "tiny.safetensors", "photos", "--batch-size", "8", "--device", "cpu", "--no-report"]
    many, one = (
        subprocess.run(
            [sys.executable, "-m", "vitkit", *words, *more],
            cwd=at,
            env=os.environ | {"RAY_ADDRESS": cluster, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        for more in (
            ("--on", "ray", "--out", str(tmp_path / "many")),
            ("--bad-images", "skip", "--out", str(tmp_path / "one")),
        )
    )
    assert (many.returncode, one.returncode) == (1, 1), many.stderr + one.stderr
    assert many.stdout.splitlines()[1:-1] == one.stdout.splitlines()[1:-1]  # but for the rate, and the names of files
    assert (tmp_path / "many/predictions.csv").read_bytes() == (tmp_path / "one/predictions.csv").read_bytes()
    assert {line for line in many.stderr.splitlines() if not line.startswith(("vitkit: ", "evaluating: "))} == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_machines_actors_and_the_driver_may_die(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ray_chaos", "--images", "1500", "--kills", "3", "--driver-kills", "1"]
        + ["--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    log = tmp_path / "log.txt"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")[-3000:]
    assert "every image is there exactly once" in done.stdout
