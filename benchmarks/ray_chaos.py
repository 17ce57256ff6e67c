"""Kill machines, actors and the driver of a Ray job at random, and compare its result with that of one machine.

    python -m benchmarks.ray_chaos [--images 20000] [--kills 20] [--driver-kills 2] [--nodes 4] [--seed 0]

A tiny ViT embeds small photos on a cluster of simulated machines (`ray.cluster_utils`). A process of its own holds the
cluster: it kills machines and actors (SIGKILL) in turn as the job advances, and adds a new machine for each that it
killed. This process starts the driver, kills it too, and starts it again. The first machine, which holds Ray's records
and the driver, stays. Actors that decode and actors that compute are apart, as on GPUs, but compute on the CPU. Where a
kill is due, the model waits until it is about to come, so that a fast job does not end before it. At the end,
every image must be there exactly once, equal to the bit to what `vitkit embed` computes on one machine, unreadable
images included. The exit code is 1 if one is not. Needs Linux.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

BATCH = 16
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # as in actors: another number of threads may round differently
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
BROKEN = 7  # every so many hundred images one is not an image


def tiny() -> Any:
    """Return a ViT with depth 2, width 32 and 32 px, the same every time."""
    import torch

    from vitkit import InputSpec, ViT, ViTConfig

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = ViT(ViTConfig(image_size=32, patch_size=8, num_classes=0, **sizes), InputSpec(size=(32, 32)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def photos(folder: Path, count: int) -> None:
    """Write different small photos of two classes; a few of them are not images."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(count):
        place = folder / ("cat" if i % 2 else "dog") / f"{i:06d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        if i % (100 * BROKEN) == 99:
            place.write_bytes(b"not an image %d" % i)
        else:
            Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(place)


def sources(folder: Path) -> Any:
    from vitkit.data import open_source

    return {"all": open_source(folder / "photos", "all")}


def plan(folder: Path, shards: Iterable[float]) -> list[float]:
    """Write down after which numbers of finished shards something is killed, and return them in order."""
    (folder / "kills").mkdir(exist_ok=True)
    at = sorted(shards)
    for kill in at:
        (folder / "kills" / str(kill)).touch()
    return at


def due(folder: Path, at: list[float]) -> bool:
    """Return whether the next kill is due; if it is, the job goes on, and the kill is to come right away."""
    if not at or finished(folder) < at[0]:
        return False
    (folder / "kills" / str(at.pop(0))).unlink()
    return True


def drive(folder: Path) -> None:
    """Be the driver: run the job, or what is left of it."""
    from vitkit.jobs import on_ray

    def wait(*_: Any) -> None:
        while any(finished(folder) >= float(kill.name) for kill in (folder / "kills").iterdir()):
            time.sleep(0.02)

    model = tiny()
    model.patch_embedding.register_forward_pre_hook(wait)  # it goes to the actors with the model
    job = on_ray.run(
        "embed",
        model,
        sources(folder),
        folder / "out",
        batch_size=BATCH,
        device="cpu",
        precision="fp32",
        apart=True,
    )
    print(
        f"the driver finished: {job.computed} of {job.images} images since its start, {job.seconds:.0f} s", flush=True
    )


def finished(folder: Path) -> int:
    """Return the number of shards in the manifest."""
    manifest = folder / "out" / "manifest.jsonl"
    return len(manifest.read_bytes().splitlines()) if manifest.is_file() else 0


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    try:
        return [int(child) for file in found for child in file.read_text(encoding="utf-8").split()]
    except OSError:
        return []


def actors(nodes: list[Any]) -> list[int]:
    """Return the processes of actors on some machines."""
    pids = [pid for node in nodes for raylet in node.all_processes["raylet"] for pid in children(raylet.process.pid)]
    names = {}
    for pid in pids:
        try:
            names[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
    return [pid for pid, name in names.items() if name.startswith(b"ray::") and b"MapWorker" in name]


def kill_actor(nodes: list[Any], rng: random.Random) -> bool:
    """Kill one of the actors on some machines; return whether there was one."""
    running = actors(nodes)
    rng.shuffle(running)
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def add(cluster: Any, size: dict[str, Any]) -> Any:
    """Add a machine; on a busy computer it may not start in time, and is tried again."""
    for attempt in range(10):
        try:
            return cluster.add_node(**size)
        except Exception as error:
            print(f"a machine did not start (attempt {attempt + 1}): {error}", flush=True)
            time.sleep(2)
    raise SystemExit("no machine could be added")


def hold(folder: Path, shards: int, nodes: int, kills: int, seed: int) -> None:
    """Hold the cluster, and kill machines and actors when the job has come far enough for the next kill."""
    from ray.cluster_utils import Cluster

    rng = random.Random(seed)
    size = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=size | {"include_dashboard": False})
    others = [add(cluster, size) for _ in range(nodes - 1)]
    at = plan(folder, (rng.uniform(0.02, 0.75) * shards for _ in range(kills)))
    (folder / "address").write_text(cluster.address, encoding="utf-8")
    counts = {"machine": 0, "actor": 0}
    try:
        while not (folder / "done").exists():
            if due(folder, at):
                time.sleep(rng.uniform(0, 0.5))  # so that it comes while others compute and write
                if len(at) % 2 == 1 and kill_actor(others, rng):
                    counts["actor"] += 1
                else:
                    victim = others.pop(rng.randrange(len(others)))
                    cluster.remove_node(victim, allow_graceful=False)
                    others.append(add(cluster, size))
                    counts["machine"] += 1
                (folder / "kills.json").write_text(json.dumps(counts), encoding="utf-8")
                time.sleep(rng.uniform(0.5, 3))
            time.sleep(0.2)
    finally:
        cluster.shutdown()


def compare(folder: Path) -> list[str]:
    """Return what is wrong with the result; nothing if it is that of one machine."""
    import numpy as np
    import pyarrow.parquet as pq
    import torch

    from vitkit.features.cache import FeatureCache
    from vitkit.features.embed import embed

    torch.set_num_threads(1)
    wrong: list[str] = []
    source = sources(folder)["all"]
    one = embed(tiny(), source, FeatureCache(folder / "cache"), batch_size=BATCH, workers=1, bad_images="skip")
    listed = [json.loads(line) for line in (folder / "out/manifest.jsonl").read_bytes().splitlines()]
    hashes = {entry["shard"]: entry["sha256"] for entry in listed}
    rows: list[dict[str, Any]] = []
    for shard in sorted((folder / "out").glob("*.parquet")):
        if hashlib.sha256(shard.read_bytes()).hexdigest() != hashes.pop(shard.name, None):
            wrong.append(f"{shard.name} is not what the manifest says")
        rows += pq.read_table(shard).to_pylist()
    if hashes:
        wrong.append(f"{len(hashes)} shards are listed and missing")
    if [row["name"] for row in rows] != list(source.names):
        wrong.append(f"expected {len(source)} images, each once and in order; got {len(rows)}")
    if [row["name"] for row in rows if row["error"] is None] != list(one.names):
        wrong.append("other images are unreadable than on one machine")
    features = np.array([row["feature"] for row in rows if row["feature"] is not None], np.float32)
    if features.shape != one.features.shape or not np.array_equal(features, one.features):
        wrong.append("features differ from those of one machine")
    if left := list((folder / "out").glob(".vitkit-*")):
        wrong.append(f"{len(left)} temporary folders are left")
    return wrong


def run(images: int, kills: int, driver_kills: int, nodes: int, seed: int, folder: Path) -> list[str]:
    """Run the job under attack and print what happened; returns what is wrong with its result."""
    from vitkit.cluster.plan import shard_images

    if not (folder / "photos").is_dir():
        photos(folder / "photos", images)
    shards = -(-images // shard_images(images, BATCH, 3 * 32 * 32))
    env, rng = os.environ | ENVIRONMENT, random.Random(seed + 1)
    me = [sys.executable, "-m", "benchmarks.ray_chaos", "--folder", str(folder)]
    start = time.perf_counter()
    log = open(folder / "log.txt", "ab")  # noqa: SIM115
    more = ["--nodes", str(nodes), "--kills", str(kills), "--seed", str(seed), "--hold", str(shards)]
    holder = subprocess.Popen([*me, *more], env=env, stdout=log, stderr=log)
    try:
        while not (folder / "address").exists():
            if holder.poll() is not None:
                return [f"the cluster did not start; see {folder / 'log.txt'}"]
            time.sleep(0.2)
        env["RAY_ADDRESS"] = (folder / "address").read_text(encoding="utf-8")
        at, killed = plan(folder, (rng.uniform(0.05, 0.75) * shards for _ in range(driver_kills))), 0
        while True:
            driver = subprocess.Popen([*me, "--drive"], env=env, stdout=log, stderr=log)
            while driver.poll() is None and not due(folder, at):
                time.sleep(0.2)
            if driver.poll() is None:
                time.sleep(rng.uniform(0, 0.5))
                driver.kill()
                driver.wait()
                killed += 1
            elif driver.returncode == 0:
                break
            else:
                return [f"the driver failed; see {folder / 'log.txt'}"]
        seconds = time.perf_counter() - start
    finally:
        (folder / "done").touch()
        try:
            holder.wait(60)
        except subprocess.TimeoutExpired:
            holder.kill()
        log.close()
    counts = json.loads((folder / "kills.json").read_text(encoding="utf-8")) if kills else {"machine": 0, "actor": 0}
    wrong = compare(folder)
    print(
        f"{images} images in {shards} shards on {nodes} simulated machines: killed {counts['machine']} machines, "
        f"{counts['actor']} actors and {killed} drivers in {seconds:.0f} s"
    )
    if (came := sum(counts.values()) + killed) < kills + driver_kills:
        wrong.append(f"only {came} of {kills + driver_kills} kills came before the end")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000, help="number of photos (default: 20000)")
    parser.add_argument("--kills", type=int, default=20, help="machines and actors to kill (default: 20)")
    parser.add_argument("--driver-kills", type=int, default=2, help="drivers to kill (default: 2)")
    parser.add_argument("--nodes", type=int, default=4, help="simulated machines (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="decides what is killed and when (default: 0)")
    parser.add_argument("--folder", type=Path, help="an empty folder to keep everything in (default: a temporary one)")
    parser.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        drive(given.folder)
        return 0
    if given.hold is not None:
        hold(given.folder, given.hold, given.nodes, given.kills, given.seed)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        wrong = run(given.images, given.kills, given.driver_kills, given.nodes, given.seed, folder)
        print("\n".join(wrong) or "every image is there exactly once, equal to the bit to one machine's result")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
