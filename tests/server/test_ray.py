"""The same app by Ray Serve, on a local cluster of two workers."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import vitkit
from benchmarks.fuzz_serve import multipart, picture, request, send, wait_for
from tests.server.conftest import tiny


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
def test_two_replicas_on_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'vitkit[scale]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    model, images = tiny(), [picture(random.Random(i), "PNG") for i in range(40)]
    vitkit.save(model, tmp_path / "tiny.safetensors")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        port = free_port()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vitkit",
                "serve",
                str(tmp_path / "tiny.safetensors"),
                "--ray",
                "--replicas",
                "2",
                "--port",
                str(port),
                "--max-delay",
                "20",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"RAY_ADDRESS": cluster.address},
        )
        try:
            assert process.stdout is not None
            assert "2 replicas" in process.stdout.readline()
            wait_for(port)
            with ThreadPoolExecutor(16) as pool:
                answers = list(
                    pool.map(lambda raw: send(port, request("POST", "/v1/predict", *multipart(raw))), images)
                )
            assert [answer.status for answer in answers] == [200] * len(images)
            for answer, expected in zip(answers, vitkit.predict(model, images), strict=True):
                top = json.loads(answer.body)["results"][0]["top"]
                assert [one["class"] for one in top] == [guess.name for guess in expected.guesses]
                assert [one["p"] for one in top] == pytest.approx([g.probability for g in expected.guesses], abs=1e-5)
            counted, batches = set(), 0
            for _ in range(30):  # each replica counts for itself
                text = send(port, request("GET", "/metrics")).body.decode()
                found = re.search(r'path="/v1/predict",status="200"} (\d+)', text)
                size = re.search(r'vitkit_batch_size_count{work="predict"} (\d+)', text)
                if found and size and found[1] not in counted:
                    counted.add(found[1])
                    batches += int(size[1])
            assert len(counted) == 2 or counted == {"20"}  # both, be it in equal shares
            assert batches < len(images)  # Ray did gather them
            assert send(port, request("POST", "/v1/predict", *multipart(b"broken"))).status == 422
            assert send(port, request("GET", "/")).status == 200
        finally:
            process.send_signal(signal.SIGTERM)
            out, error = process.communicate(timeout=120)
        assert "vitkit: stopped." in out, error[-2000:]
    finally:
        cluster.shutdown()
