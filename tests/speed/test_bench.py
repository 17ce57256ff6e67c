"""`vitkit bench`: the bookkeeping is right. No test asserts a speed."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typer.testing import CliRunner

from vitkit import cpu_products
from vitkit.cli import app
from vitkit.data.folder import Files
from vitkit.errors import BadImage, ConfigError, OutputError, UnknownName
from vitkit.jobs import bench as job
from vitkit.jobs import peers
from vitkit.jobs.bench import data, inference, limit, loading, training, turns
from vitkit.jobs.bench.options import DEVICES
from vitkit.jobs.peers import PEERS
from vitkit.model.config import InputSpec, ViTConfig
from vitkit.model.vit import ViT
from vitkit.speed.training import TrainingForward

TINY = ViTConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    image_size=32,
    patch_size=8,
    num_classes=5,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitkit.jobs.bench.options.variant", lambda name, **fields: dataclasses.replace(TINY, **fields))


def needs(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            pytest.skip(f"{name} is not installed")


def options(**changes: object) -> job.Options:
    return job.Options(**{"model": "vit-ti/16", "rounds": 2, "seconds": 0.001, "load": 0.0, **changes})


def tables(*what: str, **changes: object) -> list[job.Benchmark]:
    return list(job.bench(what, options(**changes)))


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def check(found: job.Benchmark, work: int) -> None:
    """What is true of every table with peers."""
    best = next(row for row in found.rows if row.name == found.best_peer)
    assert best.kind == "peer"
    assert best.ratio == (1.0, 1.0, 1.0)
    assert best.rate == max(row.rate for row in found.rows if row.kind == "peer")
    for row in found.rows:
        assert row.rate == pytest.approx(work / row.milliseconds * 1e3)
        assert row.ratio[1] <= row.ratio[0] <= row.ratio[2]
    assert found.markdown().count("\n| ") == len(found.rows)  # the head is the first line


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_is_the_same_architecture(name: str) -> None:
    needs(name)
    model = PEERS[name](TINY).eval()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    ours = sum(p.numel() for p in ViT(TINY).parameters())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(ours, rel=0.02)


def test_contenders_take_turns_and_are_compared_round_by_round() -> None:
    calls: list[str] = []
    clock = iter(range(10_000))
    runs: dict[str, Callable[[], None]] = {name: lambda name=name: calls.append(name) for name in "abc"}
    took = turns.alternate(runs, 4, 0.5, turns.CPU, lambda: float(next(clock)))
    assert calls[6:] == list("abcbcacababc")  # after one to warm up and one to count, each
    assert took == {name: [1.0] * 4 for name in "abc"}
    assert turns.ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0]) == (2.0, 1.0, 3.0)


def test_a_contender_that_fails_is_named_and_the_others_are_measured() -> None:
    def out_of_memory() -> None:
        raise RuntimeError("no memory left\nand a long story")

    def of_another_kind() -> turns.Run:
        raise AttributeError("no such thing")

    found = turns.Contenders(options())
    assert found.add("ours", "a", lambda: lambda: None)
    assert not found.add("peer", "b", lambda: out_of_memory)
    assert not found.add("peer", "c", of_another_kind)
    table = found.table("t", 1)
    assert [row.name for row in table.rows] == ["a"]
    assert table.notes == ("b: no memory left", "c: no such thing")
    with pytest.raises(ConfigError, match="Nothing could be measured for 't'"):
        turns.Contenders(options()).table("t", 1)


def test_numbers_that_cannot_be_trusted_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)

    def doubts(**changes: object) -> str:
        found = turns.Contenders(options(**changes))
        found.add("ours", "a", lambda: lambda: None)
        return found.table("t", 1).markdown().partition("Do not trust this: ")[2]

    assert doubts() == doubts(load=1.0) == doubts(load=float("nan")) == ""
    assert doubts(rounds=1).startswith("one round says nothing about the spread")
    assert doubts(load=1.1).startswith("the load was 1.1 on 4 cores before it began")
    assert "the load was 9.0" in doubts(rounds=1, load=9.0)
    monkeypatch.setattr("os.getloadavg", lambda: (3.5, 0.0, 0.0), raising=False)
    assert job.Options().load == 3.5  # read before anything is built
    monkeypatch.delattr("os.getloadavg")  # as on Windows
    assert job.Options().load != job.Options().load


def test_inference() -> None:
    needs("vit-pytorch", "timm")
    (found,) = tables("inference", batch_size=[2], engine=["torch", "cpu-fused"], peer=["vit-pytorch", "timm"])
    assert [row.name for row in found.rows] == ["torch", "cpu-fused", "vit-pytorch", "timm", limit.LIMIT]
    assert [row.kind for row in found.rows] == ["ours", "ours", "peer", "peer", "limit"]
    check(found, 2)
    assert "thread, torch" in found.markdown()


def test_training() -> None:
    needs("timm")
    (found,) = tables("training", batch_size=[3], peer=["timm"])
    assert [(row.kind, row.name) for row in found.rows] == [
        ("ours", "train"),
        ("ours", "plain model"),
        ("peer", "timm"),
        ("limit", limit.LIMIT),
    ]
    check(found, 3)
    assert found.title == "vit-ti/16, training, batch 3, cpu, float32"
    assert "| ms per step |" in found.markdown()


def test_compiled_contenders_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("timm")
    asked: list[type] = []

    def compiler(model: nn.Module, **how: object) -> nn.Module:
        asked.append(type(model))
        assert how["dynamic"] is False
        return model

    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    (found,) = tables("training", batch_size=[1], peer=["timm"], compiled=True)
    assert [row.name for row in found.rows] == [
        "train",
        "train --compile",
        "plain model",
        "timm",
        "timm, compiled",
        limit.LIMIT,
    ]
    assert asked[0] is TrainingForward
    (found,) = tables("inference", batch_size=[1], engine=["torch"], peer=["timm"], compiled=True)
    assert [row.name for row in found.rows] == ["torch", "timm", "timm, compiled", limit.LIMIT]


def test_on_cuda_peers_run_as_they_are_compiled_and_at_their_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wiring, on the CPU: what a CUDA device would be asked to run."""
    needs("timm")

    class Cuda(str):
        type, index = "cuda", None

    asked: list[tuple[object, bool]] = []
    graphs: list[Callable[[], object]] = []

    def compiler(model: nn.Module, **how: object) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            asked.append((how.get("options", how.get("mode")), torch.backends.cuda.flash_sdp_enabled()))
            with sdpa_kernel(SDPBackend.MATH):  # the CPU has no cuDNN
                return model(x)

        return forward

    def graphed(run: turns.Run) -> turns.Run:
        graphs.append(run)
        return run

    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # optimizers would ask for its stream
    for module in (inference, limit):
        monkeypatch.setattr(module, "graphed", graphed)
    monkeypatch.setattr(job.Options, "torch_device", property(lambda self: Cuda("cpu")))
    for batch, compiled, captured in ((1, "timm, compiled, CUDA graph", 3), (2, "timm, compiled", 2)):
        asked.clear(), graphs.clear()
        how = {"batch_size": [batch], "dtype": "float32", "peer": ["timm"], "rounds": 1}
        (found,) = tables("inference", engine=["torch"], **how)
        best = "timm, compiled, cuDNN attention, CUDA graph"
        assert [row.name for row in found.rows] == ["torch", "timm", compiled, best, limit.LIMIT]
        assert len(graphs) == captured  # the limit is one too
        assert asked[0] == (None, True)
        assert (inference.APART, False) in asked  # compiled when it first runs, with cuDNN's attention alone
    asked.clear()
    (found,) = tables("training", **how)
    names = ["timm", "timm, compiled", "timm, compiled, cuDNN attention, CUDA graphs"]
    assert [row.name for row in found.rows] == ["train", "plain model", *names, limit.LIMIT]
    assert asked[0] == (None, True)
    assert ("reduce-overhead", False) in asked


def test_everything_is_measured_on_the_chosen_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, how = [], options()
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(job.Options, "torch_device", property(lambda self: torch.device("cuda:1")))
    job.bench(["inference"], how)
    assert chosen == [torch.device("cuda:1")]


def test_a_step_trains() -> None:
    model, x, y = ViT(TINY), torch.randn(4, 3, 32, 32), torch.arange(4)
    step = training.step_of(TrainingForward(model), training.adamw(model), x, y, torch.float32)

    def loss() -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(model(x), y).item()

    before = loss()
    for _ in range(20):
        step()
    assert loss() < before
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("changes", [{}, {"hidden_dropout_prob": 0.2, "drop_path_rate": 0.3}])
def test_the_whole_step_is_the_step_of_the_others(changes: dict[str, float]) -> None:
    """Ours on CUDA, with a stand-in for its graph: the same weights as by the step that peers do."""
    config, x, y = dataclasses.replace(TINY, **changes), torch.randn(4, 3, 32, 32), torch.arange(4)
    torch.manual_seed(0)
    mine, theirs = ViT(config), ViT(config)
    theirs.load_state_dict(mine.state_dict())
    captured: list[Callable[[], Tensor]] = []

    class Graph:
        def replay(self) -> None:
            captured[0]()

    def capture(work: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        captured.append(work)
        return Graph(), torch.zeros(4)

    torch.manual_seed(1)
    step = training.whole_step(mine, x, y, "fp32", capture=capture)
    for _ in range(2):
        step()
    assert len(captured) == 1
    torch.manual_seed(1)
    step = training.step_of(theirs, training.adamw(theirs), x, y, torch.float32)
    for _ in range(5):  # two of ours were done before the capture, and one after it
        step()
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        if "qkv.bias" not in name:  # the true gradient of the keys' is 0, and Adam turns its rounding into steps
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dropout_and_stochastic_depth_are_everyones() -> None:
    needs("timm", "transformers", "torchvision", "vit-pytorch")
    config = dataclasses.replace(TINY, hidden_dropout_prob=0.25)
    for name, build in PEERS.items():
        rates = [m.p for m in build(config).modules() if isinstance(m, nn.Dropout) and m.p]
        assert rates, name
        assert set(rates) == {0.25}, name
    deep = dataclasses.replace(TINY, drop_path_rate=0.4)
    assert [block.drop_path1.drop_prob for block in PEERS["timm"](deep).blocks[1:]] == pytest.approx([0.4])
    (found,) = tables("training", batch_size=[1], drop_path=0.4, dropout=0.25)
    assert found.title == "vit-ti/16, training, batch 1, cpu, float32, dropout 0.25, stochastic depth 0.4"
    assert [row.name for row in found.rows] == ["train", "plain model", "timm", limit.LIMIT]
    assert "transformers: transformers has no stochastic depth." in found.notes


def test_half_precision_is_autocast() -> None:
    class Scale(nn.Module):  # no matrix product: some machines name bf16 instructions that they cannot run
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16
            return x.bfloat16() * self.w

    model = Scale()
    training.step_of(model, training.adamw(model), torch.ones(2, 5), torch.zeros(2, dtype=torch.long), torch.bfloat16)()
    assert model.w.dtype == torch.float32
    assert not torch.equal(model.w, torch.ones(5))


@pytest.mark.parametrize("wider", [False, True])
def test_the_limit_is_the_products_of_the_dense_layers(wider: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is the one that our engines use: next to another, they could be faster than the limit."""
    done: list[int] = []

    def linear(x: Tensor, W: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch.matmul(x, W.mT)
        assert y.shape == (len(x), len(W))
        done.append(x.shape[0] * x.shape[1] * W.shape[0])
        return y

    unused = Mock(side_effect=AssertionError("the other library"))
    monkeypatch.setattr(nn.functional, "linear", unused if wider else linear)
    monkeypatch.setattr(cpu_products, "_by_onednn", linear if wider else unused)
    monkeypatch.setattr(cpu_products, "onednn_is_wider", lambda: wider)
    monkeypatch.setattr(cpu_products, "LEAST", 0)
    limit.products(TINY, 3, turns.CPU, torch.float32)()
    forward = sum(done)
    kernels = sum(p.numel() for block in ViT(TINY).blocks for p in block.parameters() if p.ndim > 1)
    assert forward == 3 * 17 * kernels
    done.clear()
    limit.products(TINY, 3, turns.CPU, torch.float32, backward=True)()
    assert sum(done) == 3 * forward


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # the peers' own
@pytest.mark.parametrize("name", loading.LOADERS)
def test_loading(name: str, tmp_path: Path) -> None:
    needs(name)
    dialect, how = loading.LOADERS[name]
    path = loading.write(TINY, dialect, tmp_path)
    x = torch.randn(2, 3, 32, 32)
    ours, theirs = loading.ours(path, TINY)(), how(path, TINY)().eval()
    with torch.inference_mode():
        answer = theirs(x)
        assert torch.allclose(ours(x), getattr(answer, "logits", answer), atol=1e-4)  # both read the file
    (found,) = tables("loading", peer=[name, "vit-pytorch"])
    assert [(row.kind, row.name) for row in found.rows] == [("ours", "load"), ("peer", name)]
    check(found, 1)
    assert found.unit == "loads/s"
    assert found.notes == ("vit-pytorch: has no loader of its own for a file of weights.",)


def test_loading_logs_nothing(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A warning for every load would be measured, and read a hundred times."""
    for dialect in ("huggingface", "timm"):
        loading.ours(loading.write(TINY, dialect, tmp_path), TINY)()
    assert not caplog.records


def test_data_of_a_folder(tmp_path: Path) -> None:
    needs("timm", "torchvision")
    (tmp_path / "a").mkdir()
    for n in range(3):
        Image.effect_noise((60, 40), 50).convert("RGB").save(tmp_path / "a" / f"{n}.jpg")
    first, second, third = tables("data", data=tmp_path)
    assert first.title == "evaluation, 3 photos of 60 x 40 to 32 px, processor time"
    assert second.title.startswith("random crops and flips, 3 photos")
    assert third.title.startswith("crops, flips and colour jitter, 3 photos")
    for found in (first, second, third):
        assert [row.name for row in found.rows] == ["loader", "loader, decoded cache", "timm", "torchvision"]
        check(found, 3)
    before = torch.get_num_threads()
    (tmp_path / "a" / "3.jpg").write_bytes(b"nothing")
    with pytest.raises(BadImage, match=r"3\.jpg"):
        tables("data", data=tmp_path)
    assert torch.get_num_threads() == before


def test_sample_photos_and_the_same_pixels_as_the_peers(tmp_path: Path) -> None:
    needs("timm", "torchvision")
    paths = data.make_photos(tmp_path, 2)
    assert [size(path) for path in paths] == [(640, 427), (639, 426)]
    source = Files(tmp_path, [path.name for path in paths], [0, 0], ["photo"])
    spec = InputSpec(size=(64, 64), resize="crop", crop=0.9, interpolation="bicubic")

    def digest(x: Tensor) -> str:
        return hashlib.sha256(x.numpy().tobytes()).hexdigest()

    for transform in data.TRANSFORMS.values():
        assert data.evaluation(source, spec, digest) == data.theirs(paths, transform(spec, None), digest)


def test_photos_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert size(data.make_photos(tmp_path, 1)[0]) == (640, 427)


def test_a_large_folder_is_measured_in_whole_batches() -> None:
    names = [f"{n:04d}.jpg" for n in range(1000)]
    assert len(data.some(names)) == data.PHOTOS
    assert data.some(names)[0].name == "0000.jpg"
    assert data.some(names)[-1].name == "0999.jpg"
    assert len(data.some(names[:50])) == data.BATCH
    assert len(data.some(names[:20])) == 20


def test_a_peer_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    for what in ("inference", "training"):
        (found,) = tables(what, batch_size=[1], peer=["timm"], **({"engine": ["torch"]} if what == "inference" else {}))
        assert found.best_peer == ""
        assert {row.kind for row in found.rows} == {"ours", "limit"}
        assert found.notes[0] == "timm: timm is not installed; to measure it too: pip install timm."
        assert "Not measured: timm" in found.markdown()
    data.make_photos(tmp_path, 1)
    for found in tables("loading", "data", peer=["timm"], data=tmp_path):
        assert "is not installed" in found.notes[0]


def test_the_command_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "Options", partial(job.Options, seconds=0.001))
    log = tmp_path / "log.md"
    log.write_text("# Log\n", encoding="utf-8")
    common = ["bench", "vit-ti/16", "--peer", "none", "--rounds", "1", "--log", str(log)]
    done = CliRunner().invoke(
        app,
        [
            *common,
            "--what",
            "inference",
            "--what",
            "training",
            "--engine",
            "torch",
            "--batch-size",
            "1",
            "--batch-size",
            "2",
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    assert [table["title"] for table in json.loads(done.output)] == [
        f"vit-ti/16, {training}batch {n}, cpu, float32" for training in ("", "training, ") for n in (1, 2)
    ]
    text = log.read_text(encoding="utf-8")
    assert text.startswith("# Log\n\n## 20")
    assert text.count("| **vitkit torch** |") == text.count("| **vitkit train** |") == 2
    done = CliRunner().invoke(app, [*common, "--what", "loading"])
    assert done.exit_code == 0, done.output
    assert done.output.count("| **vitkit load** |") == 2
    assert done.output.endswith(f"appended to {log}\n")


@pytest.mark.parametrize("what", [["inference", "--engine", "torch"], ["training"]])
def test_the_other_entrance_needs_torch_alone(what: list[str]) -> None:
    absent = ["typer", "rich", "click", "matplotlib", "sklearn", "accelerate", "timm", "transformers", "vit_pytorch"]
    words = ["benchmarks", *what, "--model", "vit-ti/16", "--batch-size", "1", "--rounds", "1", "--peer"]
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({absent}))
sys.argv = {words}
runpy.run_module("benchmarks", run_name="__main__")
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("| vit-ti/16, ")
    assert f"| limit: {limit.LIMIT} |" in done.stdout
    assert "Do not trust this: one round" in done.stdout
    code = code.replace("--model", "--modle")
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 2
    assert "unrecognized arguments: --modle" in done.stderr


def test_cudnn_attention_is_left_as_it_was() -> None:
    def others() -> tuple[bool, ...]:
        cuda = torch.backends.cuda
        return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()

    with peers.cudnn_attention():
        assert others() == (False,) * 3
    assert others() == (True,) * 3


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="Unknown engine 'warp'"):
        job.Options(engine=["warp"])
    with pytest.raises(UnknownName, match="Unknown peer 'tim', did you mean 'timm'"):
        job.Options(peer=["tim"])
    for device in ("meta", "warp"):
        with pytest.raises(ConfigError, match="device must be cpu, or cuda on a machine that has it"):
            job.Options(device=device)
    for wrong in ({"batch_size": [2, 0]}, {"rounds": 0}, {"merge": [0]}):
        with pytest.raises(ConfigError, match="at least 1"):
            job.Options(**wrong)
    with pytest.raises(ConfigError, match="dtype must be"):
        job.Options(dtype="int8")
    with pytest.raises(ConfigError, match=r"data must be a folder of photos; .* is not a folder"):
        job.Options(data=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="float32 or bfloat16; got float16"):
        tables("training", dtype="float16")
    with pytest.raises(OutputError, match=r"--log must be an existing Markdown file; .* does not exist"):
        job.append(tmp_path / "log.md", [])
    with pytest.raises(UnknownName, match="Unknown measurement 'train', did you mean 'training'"):
        tables("train")


@pytest.mark.parametrize(
    ("what", "given", "words"),
    [
        (
            ["training"],
            {"engine": ["torch"]},
            "engine applies to inference, not to training; leave it out or measure inference",
        ),
        (
            ["loading", "data"],
            {"batch_size": [4]},
            "batch_size applies to inference and training, not to loading and data",
        ),
        (["loading"], {"device": "cpu"}, "device applies to inference and training"),
        (["inference"], {"data": Path()}, "data applies to data"),
    ],
)
def test_an_option_that_applies_to_nothing_is_refused(what: list[str], given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job.bench(what, job.Options(**given))


def test_merging_is_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="on the CPU"):
        job.Options(device="cuda", merge=[8])
    assert job.Options(device="cuda").compiling
    assert job.Options(device="cuda").torch_dtype == torch.bfloat16
    assert set(DEVICES) == {"cpu", "cuda"}
