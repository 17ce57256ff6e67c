"""`vitkit bench`: honest bookkeeping; the speeds themselves are nobody's promise here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vitkit.cli import app
from vitkit.errors import ConfigError, OutputError, UnknownName
from vitkit.jobs import bench as job
from vitkit.jobs.peers import PEERS
from vitkit.model.config import ViTConfig

TINY = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32,
                 patch_size=8, num_classes=5)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "variant", lambda name: TINY)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_is_the_same_architecture(name: str) -> None:
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        pytest.skip(f"{name} is not installed")
    model = PEERS[name](TINY).eval()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    ours = sum(p.numel() for p in job.ViT(TINY).parameters())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(ours, rel=0.02)


def test_contenders_take_turns_and_are_compared_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = iter(range(10_000))
    monkeypatch.setattr(job.time, "perf_counter", lambda: float(next(clock)))
    runs = {name: lambda x, name=name: calls.append(name) for name in "abc"}
    took = job.alternate(runs, torch.zeros(1), rounds=4, seconds=0.5)
    assert calls[9:] == list("abcbcacababc")                   # after two to warm up and one to count, each
    assert took == {name: [1.0] * 4 for name in "abc"}
    assert job._ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0]) == (2.0, 1.0, 3.0)


def test_a_table_with_everything_in_it() -> None:
    found = job.bench("vit-ti/16", batch=2, engines=["torch", "cpu-fused"], peers=["vit-pytorch", "timm"], rounds=2,
                      seconds=0.001)
    assert [row.name for row in found.rows] == ["torch", "cpu-fused", "vit-pytorch", "timm", job.LIMIT]
    assert [row.kind for row in found.rows] == ["ours", "ours", "peer", "peer", "limit"]
    best = next(row for row in found.rows if row.name == found.best_peer)
    assert best.kind == "peer"
    assert best.ratio == (1.0, 1.0, 1.0)
    assert best.rate == max(row.rate for row in found.rows if row.kind == "peer")
    for row in found.rows:
        assert row.rate == pytest.approx(2 / row.milliseconds * 1e3)
        assert row.ratio[1] <= row.ratio[0] <= row.ratio[2]
    text = found.markdown()
    assert text.count("\n| ") == 5                              # the head is the first line
    assert "threads, torch" in text


def test_a_peer_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.jobs import peers

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    found = job.bench("vit-ti/16", batch=1, engines=["torch"], peers=["timm"], rounds=1, seconds=0.001)
    assert found.best_peer == ""
    assert [row.kind for row in found.rows] == ["ours", "limit"]
    assert "timm.models.vision_transformer is not installed" in found.notes[0]
    assert "Not measured: timm" in found.markdown()


def test_the_command_and_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log.md"
    log.write_text("# Log\n")
    done = CliRunner().invoke(app, ["bench", "vit-ti/16", "--engine", "torch", "--peer", "none", "--rounds", "1",
                                    "--batch-size", "1", "--batch-size", "2", "--json", "--log", str(log)])
    assert done.exit_code == 0, done.output
    tables = json.loads(done.output)
    assert [table["title"] for table in tables] == [f"vit-ti/16, batch {n}, cpu, float32" for n in (1, 2)]
    text = log.read_text()
    assert text.startswith("# Log\n\n## 20")
    assert text.count("| **vitkit torch** |") == 2


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="Unknown engine 'warp'"):
        job.bench(engines=["warp"], peers=[])
    with pytest.raises(ConfigError, match="device must be cpu or cuda"):
        job.bench(device="meta")
    with pytest.raises(ConfigError, match="at least 1"):
        job.bench(batch=0)
    with pytest.raises(ConfigError, match="dtype must be"):
        job.bench(dtype="int8")
    with pytest.raises(OutputError, match="There is no log"):
        job.append(tmp_path / "log.md", [])
