"""Plant faults in a copy of the project, one at a time, and expect the tests of the fault's room to catch each.

A fault that survives is a line that nothing tests: add the missing assertion to the tests of its room.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        file: file below vitkit/.
        old: text that occurs exactly once in it.
        new: the fault to replace it with.
        tests: test files below tests/, one of which must fail.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def fault(file: str, old: str, new: str, *tests: str) -> Fault:
    """A row of FAULTS."""
    return Fault(file, old, new, tests)


FAULTS: dict[str, Fault] = {
    # model
    "attention is scaled by d instead of its root": fault(
        "model/vit.py", "/ q.shape[-1] ** 0.5", "/ q.shape[-1]", "model/test_vit.py"
    ),
    "LayerNorm after the residual instead of before": fault(
        "model/vit.py", "self.residual2(self.mlp(self.norm2(z))) + z", "self.norm2(self.mlp(z)) + z", "test_parity.py"
    ),
    "positions in reverse order": fault(
        "model/vit.py", "z = z + self.positions(grid)", "z = z + self.positions(grid).flip(1)", "test_parity.py"
    ),
    "pre-logits without tanh": fault(
        "model/vit.py", "torch.tanh(self.pre_logits(y))", "self.pre_logits(y)", "model/test_vit.py"
    ),
    "a head mask that counts pruned heads": fault(
        "model/vit.py", "head_mask[list(self.heads)]", "head_mask[: len(self.heads)]", "model/test_vit.py"
    ),
    "operations counted once per multiply-add": fault(
        "model/count.py", "return 2 * (embedding", "return 1 * (embedding", "model/test_count.py"
    ),
    # teach
    "a removed photo that still counts": fault(
        "features/online.py", "sign * np.eye(len(Z)) + Z @ U", "np.eye(len(Z)) + Z @ U", "features/test_online.py"
    ),
    "photos of a burst left out one by one": fault(
        "features/online.py", "numbers[counts > 1]", "numbers[counts > 99]", "features/test_online.py"
    ),
    "an action that is answered but not on disk": fault(
        "server/teach_store.py",
        '_append(self._journal, json.dumps(action).encode() + b"\\n")',
        "pass",
        "server/test_teach.py",
    ),
    "a lesson that any browser may enter": fault(
        "server/teach.py", "if lesson not in lessons.open:", "if not lessons.open:", "server/test_teach.py"
    ),
    # learn
    "a hint that any wrong answer gets": fault(
        "learn/exercise.py", "if _same(got, mistake(*given)):", "if not _same(got, right):", "test_learn.py"
    ),
    # checkpoints
    "a digit wrong in ImageNet's standard deviation": fault(
        "checkpoints/preprocessing_presets.py",
        "(0.229, 0.224, 0.225)",
        "(0.229, 0.244, 0.225)",
        "checkpoints/test_load.py",
        "checkpoints/test_spellings.py",
    ),
    "timm's crop of 0.9 as 0.875": fault(
        "checkpoints/preprocessing_presets.py",
        '"timm": HALF | _crop(0.9)',
        '"timm": HALF | _crop(0.875)',
        "checkpoints/test_load.py",
        "checkpoints/test_spellings.py",
    ),
    "Google's patch kernel transposed": fault(
        "checkpoints/rules.py", "k.permute(3, 2, 0, 1)", "k.permute(3, 2, 1, 0)", "checkpoints/test_google.py"
    ),
    "a missing position of the class token is the first patch's": fault(
        "checkpoints/rules.py",
        "torch.zeros_like(table[:, :1])",
        "table[:, :1]",
        "checkpoints/test_peers.py",
    ),
    "a gray image through a kernel that is averaged": fault(
        "checkpoints/infer.py",
        "kernel.sum(1, keepdim=True)",
        "kernel.mean(1, keepdim=True)",
        "checkpoints/test_load.py",
    ),
    # data
    "augmentation on the device repeats every epoch": fault(
        "data/on_device.py", " * GAMMA + rows[:, 0])", " * GAMMA)", "data/test_on_device.py"
    ),
    "a crop on the device reads beyond its border": fault(
        "data/on_device.py", ".minimum(w - 1)", ".minimum(w)", "data/test_on_device.py"
    ),
    "photos that differ in 24 bits count as the same": fault(
        "data/near.py", "DISTANCE = 10", "DISTANCE = 24", "data/test_messy.py"
    ),
    "a cleaned copy trains on photos of the test split": fault(
        "data/clean.py",
        'if split == "train" and judged is not None',
        'if split == "none" and judged is not None',
        "data/test_doctor.py",
    ),
    "the crop's aspect ratio is uniform, not log-uniform": fault(
        "data/augment.py",
        "math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))",
        "rng.uniform(*ratio)",
        "data/test_augment.py",
    ),
    "RandAugment rotates by 20 degrees instead of 30": fault(
        "data/randaugment.py", "_sign(rng) * 3.0 * m", "_sign(rng) * 2.0 * m", "data/test_augment.py"
    ),
    "colour jitter never brightens": fault(
        "data/augment.py",
        "rng.uniform(max(0.0, 1 - strength), 1 + strength, 3)",
        "rng.uniform(max(0.0, 1 - strength), 1, 3)",
        "data/test_augment.py",
    ),
    "CutMix keeps the weight it drew instead of the box's": fault(
        "data/mix.py",
        "slice(left, right)), 1 - (bottom - top) * (right - left) / (H * W)",
        "slice(left, right)), self.weight",
        "data/test_loader.py",
        "data/test_augment.py",
    ),
    "a repeated image is augmented as before": fault(
        "data/order.py", "np.full(len(part), turn)", "np.full(len(part), epoch)", "data/test_balanced_order.py"
    ),
    "every epoch in the same order": fault(
        "data/order.py",
        'rng(self.seed, "order", epoch).permutation(every)',
        'rng(self.seed, "order", 0).permutation(every)',
        "data/test_order.py",
    ),
    "the size before the crop is rounded up": fault(
        "data/preprocess.py", "math.floor(H / spec.crop)", "math.ceil(H / spec.crop)", "data/test_preprocess.py"
    ),
    # training
    "Muon makes q, k and v orthogonal as one matrix": fault(
        "training/optim.py", 'stacked = {"qkv": 3', 'stacked = {"qkv": 1', "training/test_parts.py"
    ),
    "Muon's update ignores the size of the matrix": fault(
        "training/muon.py", " * max(shape) ** 0.5", "", "training/test_parts.py"
    ),
    "a state is saved while the next step is computed": fault(
        "training/loop.py", "not stop and not self.calendar.is_due(step + 1)", "not stop", "training/test_ahead.py"
    ),
    "a captured step reads the images of the first one": fault(
        "training/whole_step.py",
        "in names:\n            getattr(self.batch",
        "in ():\n            getattr(self.batch",
        "training/test_parts.py",
    ),
    "accumulated gradients divided by the micro-batch": fault(
        "training/gradients.py",
        "loss * counted / self.mean_share",
        "loss * counted / self.split.micro",
        "training/test_loop.py",
    ),
    "uneven shares of a batch weigh the same": fault(
        "training/gradients.py",
        "loss * counted / self.mean_share",
        "loss * counted / len(batch)",
        "training/test_processes.py",
    ),
    "gradients are added up in another order after a restart": fault(
        "training/gradients.py", "if not self.ordered:", "if False:", "training/test_restarts.py"
    ),
    "a restarted group uses the names of the one before it": fault(
        "process_group.py",
        'group = f"vitkit/group/{uuid.uuid4().hex}"',
        'group = "vitkit/group"',
        "test_process_group.py",
    ),
    "every torchrun job resumes the run that it finds": fault(
        "jobs/train.py", 'launch() in RunFolder.open(out).info.get("launch", ())', "True", "training/test_restarts.py"
    ),
    "class weights ignore what an image is mixed with": fault(
        "training/class_weights.py", "weight=own / (own + other)", "weight=batch.weight", "training/test_imbalance.py"
    ),
    "a tie counts as better": fault(
        "training/stopping.py", "0 if better else", "0 if new_best else", "training/test_stopping.py"
    ),
    "ties in average precision come one by one": fault(
        "evaluation/labels.py", "np.append(np.diff(p[order]) != 0, True)", "p[order] > -1", "evaluation/test_labels.py"
    ),
    "a threshold lies on the last probability that it accepts": fault(
        "evaluation/labels.py",
        "(accepted + np.append(accepted[1:], 0.0)) / 2",
        "accepted",
        "evaluation/test_labels.py",
    ),
    "the average gets the thresholds of the last weights": fault(
        "training/saving.py", "p.thresholds.get(which)", 'p.thresholds.get("last")', "training/test_labels.py"
    ),
    "labels of a mixed image are not mixed": fault(
        "data/mix.py", "(1 - weight[:, None]) * others", "(1 - weight[:, None]) * labels", "data/test_labels.py"
    ),
    "adapters change the model before the first step": fault(
        "training/lora.py", "W.new_zeros(rows, rank)", "W.new_ones(rows, rank)", "training/test_lora.py"
    ),
    "a wrong backbone is accepted by its name": fault(
        "checkpoints/adapters.py",
        "digest(own.state) != found",
        "found.backbone.sha256 != found",
        "training/test_lora.py",
    ),
    "tune keeps a candidate that is worse than the probe": fault(
        "jobs/tuning.py",
        "row.gain is not None and row.gain > self.needed * (row.error or 0.0)",
        "row.gain is not None",
        "training/test_tune.py",
    ),
    "validation's top-5 counts six": fault(
        "training/objectives.py", "(rank < 5)", "(rank < 6)", "training/test_loop.py"
    ),
    "training accuracy under mixing counts the wrong label": fault(
        "training/objectives.py",
        "torch.where(batch.weight >= 0.5, batch.labels, batch.others)",
        "batch.labels",
        "training/test_loop.py",
    ),
    "the loss stays in bf16": fault(
        "training/objectives.py", "logits = logits.float()", "logits = logits", "training/test_loop.py"
    ),
    "AugReg's weight decay": fault(
        "training/recipes.py",
        "weight_decay=0.1,\n    dropout=0.0,\n    pre_logits=False,",
        "weight_decay=0.03,\n    dropout=0.0,\n    pre_logits=False,",
        "training/test_recipes.py",
    ),
    "norms and biases decay too": fault(
        "training/optim.py",
        "recipe.weight_decay if name in decaying else 0.0",
        "recipe.weight_decay",
        "training/test_parts.py",
    ),
    "layer decay counted from the bottom": fault(
        "training/optim.py", "(layers + 1 - layer_of(name, layers))", "layer_of(name, layers)", "training/test_parts.py"
    ),
    "the running average moves by decay instead of the rest": fault(
        "training/optim.py",
        "self._live, 1 - self.decay",
        "self._live, self.decay",
        "training/test_parts.py",
    ),
    "a resumed run forgets the optimiser": fault(
        "training/state.py", "if name in state:", "if name in ():", "training/test_loop.py"
    ),
    "waiting for a batch counts while the device computes": fault(
        "training/loop.py", "or self._launched[-1].arriving.done()", "or True", "training/test_ahead.py"
    ),
    "an update that does not clip": fault(
        "training/adamw.py",
        "(limit / (norm + SMALL)).clamp(max=1.0)",
        "torch.ones_like(norm)",
        "training/test_parts.py",
    ),
    "broken numbers change the weights": fault(
        "training/triton_adamw.py",
        "if tl.load(broken_at) == 0.0:",
        "if tl.load(broken_at) >= 0.0:",
        "speed/test_triton.py",
    ),
    # features
    "k-NN's temperature of 0.07 as 0.7": fault("features/knn.py", "T = 0.07", "T = 0.7", "features/test_heads.py"),
    "ridge's 2^10 as 2^8": fault("features/ridge.py", "L2 = 2.0**10", "L2 = 2.0**8", "features/test_heads.py"),
    "an image votes on itself": fault(
        "features/knn.py",
        "own[start : start + rows]] = -np.inf",
        "own[start : start + rows]] = 1",
        "features/test_heads.py",
    ),
    "the cache does not tell precisions apart": fault(
        "features/cache.py", '"precision": precision,', '"precision": "fp32",', "features/test_cache.py"
    ),
    "the cache does not tell decoders apart": fault(
        "features/cache.py",
        'PIL.__version__ if decode == "cpu" else gpu_decoder()',
        "PIL.__version__",
        "features/test_cache.py",
    ),
    "a kernel is described a weight in the wrong order": fault(
        "speed/gelu_products.py",
        "tensor_map(W.mT if columns else W, BOX)",
        "tensor_map(W, BOX)",
        "speed/test_hopper.py",
    ),
    "a kernel with other results is used if it is faster": fault(
        "speed/gelu_products.py",
        "if all(map(cublas.same, ours(), library())):",
        "if ours() and library():",
        "speed/test_hopper.py",
    ),
    "a kernel waits for the other multiprocessor by calling itself": fault(
        "speed/gelu_products.cu",
        'asm volatile("barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");',
        "cluster_sync();",
        "speed/test_hopper.py",
    ),
    "the gradient of the first token lacks its query's part": fault(
        "speed/differentiable/attention.py",
        "[:, 0] += input_gradient(dq, W[:width])",
        "[:, 0] += 0",
        "speed/test_fused.py",
    ),
    "a kernel forgets the keys before its last step": fault(
        "speed/triton_training.py",
        "sa = sa * shrink + tl.sum(A[:, None] * v, axis=0)",
        "sa = tl.sum(A[:, None] * v, axis=0)",
        "speed/test_triton.py",
    ),
    "a worker fills a slot that is in use": fault(
        "data/slots.py", "self._free.acquire()", "pass", "data/test_slots.py"
    ),
    "a file is turned the wrong way on the GPU": fault(
        "data/gpu.py",
        "6: lambda x: x.transpose(1, 2).flip(2),",
        "6: lambda x: x.transpose(1, 2).flip(1),",
        "data/test_gpu.py",
    ),
    "a negative weight of Pillow's filter is rounded the wrong way": fault(
        "data/resize.py", "np.trunc(k + np.where(k < 0, -0.5, 0.5))", "np.trunc(k + 0.5)", "data/test_resize.py"
    ),
    "the GPU resizes an image in another order than Pillow": fault(
        "data/resize.py",
        "return down.size - down.to <= 2 * max(0, across.size - across.to)",
        "return True",
        "data/test_resize.py",
    ),
    "a label is judged by a classifier that was fitted to it": fault(
        "features/labels.py", "np.flatnonzero(fold != k)", "np.flatnonzero(fold != -1)", "features/test_labels.py"
    ),
    "the limit of what is accepted is that of fitted images": fault(
        "features/unknown.py", "inside = fold != k", "inside = fold != -1", "features/test_unknown.py"
    ),
    "search returns the least similar images": fault(
        "features/search.py", "np.argsort(-best, axis=1", "np.argsort(best, axis=1", "features/test_search.py"
    ),
    # evaluation
    "nothing is none of these": fault(
        "evaluation/predict.py", "self.distance > 1", "self.distance > 1e9", "features/test_unknown.py"
    ),
    "calibration in 10 bins": fault("evaluation/measure.py", "BINS = 15", "BINS = 10", "evaluation/test_measure.py"),
    "a 90% interval called 95%": fault(
        "evaluation/measure.py", "Z95 = 1.959964", "Z95 = 1.644854", "evaluation/test_measure.py"
    ),
    "precision and recall swapped": fault(
        "evaluation/measure.py",
        "precision=_share(right[k], said[k])",
        "precision=_share(right[k], support[k])",
        "evaluation/test_measure.py",
    ),
    "the worst errors start with the least sure": fault(
        "evaluation/measure.py",
        "np.argsort(-confidence[wrong]",
        "np.argsort(confidence[wrong]",
        "evaluation/test_measure.py",
    ),
    # explain
    "rollout without the residual": fault(
        "explanations/attention.py",
        "A.mean(1) + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)",
        "A.mean(1)",
        "explanations/test_attention.py",
    ),
    "gradient rollout keeps what speaks against the class": fault(
        "explanations/attention.py", ".clamp(min=0).mean(1)", ".mean(1)", "explanations/test_attention.py"
    ),
    "attention distance in patches instead of pixels": fault(
        "explanations/attention.py", ".float() * patch_size", ".float()", "explanations/test_attention.py"
    ),
    "deletion covers the least important patches first": fault(
        "explanations/occlusion.py",
        "np.argsort(-values.reshape(-1)",
        "np.argsort(values.reshape(-1)",
        "explanations/test_occlusion.py",
    ),
    # report
    "a page that does not escape names": fault(
        "reports/render.py", "autoescape=True", "autoescape=False", "reports/test_report.py"
    ),
    "the comparison hides settings that differ": fault(
        "reports/compare.py",
        "for one in flat if key in one}) > 1",
        "for one in flat if key in one}) > 2",
        "reports/test_report.py",
    ),
    # serve
    "any token opens the server": fault(
        "server/middleware.py",
        'if scheme.lower() != "bearer" or not right:',
        'if scheme.lower() != "bearer":',
        "server/test_api.py",
    ),
    "the explorable page gives the weights away without the token": fault(
        "server/middleware.py", ', f"{EXPLORE}{MODEL}")', ")", "server/test_exploring.py"
    ),
    "every page may compile WebAssembly": fault(
        "server/middleware.py",
        'self.explore_headers if scope["path"].startswith(EXPLORE) else self.headers',
        "self.explore_headers",
        "server/test_exploring.py",
    ),
    "one request may be ten times as large": fault(
        "server/middleware.py",
        "int(self.settings.max_megabytes * 2**20)",
        "int(self.settings.max_megabytes * 10 * 2**20)",
        "server/test_api.py",
    ),
    "connections start in the order of arrival": fault(
        "server/server.py",
        'if sockets is None or sys.platform == "win32":',
        "if True:",
        "server/test_accepting.py",
    ),
    "predictions wait for explanations": fault(
        "server/service.py",
        "            return self.pace.run(upload.client,",
        "            with self.compute:\n                return self.pace.run(upload.client,",
        "server/test_attack.py",
    ),
    "what connections receive is handled in the order of arrival": fault(
        "server/accepting.py", "if client in self._waiting:", "if False:", "server/test_accepting.py"
    ),
    "a connection that had to wait is never read again": fault(
        "server/server.py", "if not self.flow.read_paused:", "if False:", "server/test_accepting.py"
    ),
    "every malformed request writes a line": fault(
        "server/logs.py", "return lines < PER_PERIOD", "return True", "server/test_logs.py"
    ),
    "the server waits for the reader of its log": fault(
        "server/logs.py",
        "if room := self._lines.qsize() < WAITING:",
        "while not (room := self._lines.qsize() < WAITING):\n            time.sleep(TICK)\n        else:",
        "server/test_logs.py",
    ),
    "the last lines of the log wait for ever": fault(
        "server/logs.py", "while time.monotonic() < self._until:", "while True:", "server/test_logs.py"
    ),
    "an answer is sent on a connection that is lost": fault(
        "server/server.py", "self.cycle.disconnected = True", "pass", "server/test_accepting.py"
    ),
    "greedy clients never wait": fault(
        "server/fair.py", "if cores > self._level else 0.0", "if False else 0.0", "server/test_attack.py"
    ),
    "a client that is alone waits": fault("server/fair.py", " and len(self._used) > 1:", ":", "server/test_attack.py"),
    "clients do not pay for decoding": fault(
        "server/fair.py",
        "self.charge(client, time.thread_time() - start)",
        "self.charge(client, 0.0)",
        "server/test_attack.py",
    ),
    "a health check counts as another client": fault(
        "server/middleware.py", 'if scope["path"] not in OPEN:', "if True:", "server/test_attack.py"
    ),
    "the heaps of the C library hold large blocks": fault(
        "server/fair.py", "{-3: 2**20, -8: 2}", "{-8: 2}", "server/test_attack.py"
    ),
    "a batch larger than the limit": fault(
        "server/batching.py",
        "range(min(self.max_batch, len(self._waiting)))",
        "range(len(self._waiting))",
        "server/test_batching.py",
    ),
    "a photo larger than the limit is decoded": fault(
        "server/uploads.py", "settings.max_megapixels * 1e6", "settings.max_megapixels * 1e7", "server/test_api.py"
    ),
    # explore
    "erased patches are still seen": fault(
        "explore/graph.py", "bias=bias, seen=seen", "seen=seen", "explore/test_graph.py"
    ),
    "erased patches count in the mean": fault(
        "explore/graph.py", "model.read(z, weight) for z", "model.read(z) for z", "explore/test_graph.py"
    ),
    "weights rounded to 12 bits": fault(
        "explore/sixteen.py", "MOST = 2**15 - 1", "MOST = 2**11 - 1", "explore/test_graph.py"
    ),
    # speed
    "merged tokens count once in attention": fault(
        "speed/graph.py", "size.log().mT[:, None]", "size.log().mT[:, None] * 0", "speed/test_merge.py"
    ),
    "two threads choosing attention kernels": fault(
        "speed/kernels.py", "    with CHOOSING:\n", "    if True:\n", "speed/test_fused.py"
    ),
    "torch's own order of kernels lost": fault(
        "speed/kernels.py", "        settle_order()", "        pass", "speed/test_fused.py"
    ),
    "algorithms compared on zeros": fault(
        "speed/cublas.py", "other = numbers_like(x)", "other = x", "speed/test_cublas.py"
    ),
    "two captures at once": fault("cuda_capture.py", "    with CAPTURING:\n", "    if True:\n", "test_cuda_capture.py"),
    "choosing kernels during a capture": fault(
        "cuda_capture.py", "            work(still)  #", "            #", "test_cuda_capture.py"
    ),
    "DINOv2's rule without its 0.1": fault("speed/axis.py", "(n / (m + 0.1))", "(n / m)", "speed/test_axis.py"),
    "the mean difference of logits instead of the largest": fault(
        "speed/accuracy.py",
        "difference=float(np.abs(error).max() / max(np.abs(plain).max(), 1e-12))",
        "difference=float(np.abs(error).mean() / max(np.abs(plain).max(), 1e-12))",
        "speed/test_export.py",
    ),
    # cluster
    "shards that cut batches in two": fault(
        "cluster/plan.py", "max(most // batch_size, 1) * batch_size", "max(most, 1)", "cluster/test_plan.py"
    ),
    "a batch of another batch's pixels": fault("cluster/work.py", "used += good", "used += 0", "cluster/test_jobs.py"),
    "a changed shard that counts as finished": fault(
        "cluster/results.py",
        "hashlib.sha256(data).hexdigest() == entry.sha256",
        "len(data) >= 0",
        "cluster/test_jobs.py",
    ),
    "storage that does not answer as a bad image": fault(
        "cluster/work.py", "raise DataError(str(error)) from error", "raise", "cluster/test_jobs.py"
    ),
    "the parts of a sharded state are not compared with their checksums": fault(
        "training/shard.py",
        "if list(_sum(file)[1]) != list(sums.get(file.name, ())):",
        "if not file.exists():",
        "training/test_shard.py",
    ),
    "sharded gradients are clipped by the norm of one part": fault(
        "training/shard.py",
        "norm = full(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))",
        "norm = torch.nn.utils.get_total_norm([p.grad.to_local() for p in parameters if p.grad is not None])",
        "training/test_shard.py",
    ),
    "the plan hides all communication": fault(
        "training/plan.py", "1.0 if job.shard else 2 / 3", "1e9", "training/test_plan.py"
    ),
    # command line
    "a mistake exits with code 1": fault(
        "cli/__init__.py", "sys.exit(error.exit_code)", "sys.exit(1)", "cli/test_cli.py"
    ),
    "--image-size reads width before height": fault(
        "cli/options.py", "(pixels[0], pixels[1])", "(pixels[1], pixels[0])", "cli/test_cli.py"
    ),
    "the average counts as the best when the weights were": fault(
        "training/saving.py", "best and p.best_weights == which", "best", "training/test_loop.py"
    ),
    # public functions
    "a model that was passed keeps its old weights": fault(
        "api/training.py", "copy_weights(trained, model)", "pass", "test_api.py"
    ),
    # the two other interfaces
    "paper.ViT without the second residual": fault(
        "paper.py", "x = self.mlp_block(x) + x", "x = self.mlp_block(x)", "test_paper.py"
    ),
    "the Hugging Face interface scales attention by d": fault(
        "huggingface.py", "/ self.attention_head_size ** 0.5", "/ self.attention_head_size", "test_parity.py"
    ),
    # errors
    "no suggestion for a misspelt name": fault("errors.py", "cutoff=0.5", "cutoff=0.99", "cli/test_cli.py"),
}


def test_every_fault_can_be_planted() -> None:
    """The table cannot go stale: each text is in its file exactly once, and its tests exist."""
    for name, planted in FAULTS.items():
        text = (ROOT / "vitkit" / planted.file).read_text(encoding="utf-8")
        assert text.count(planted.old) == 1, f"{name}: {planted.old!r} occurs {text.count(planted.old)} times"
        assert planted.new != planted.old
        assert planted.tests
        assert all((ROOT / "tests" / file).is_file() for file in planted.tests), name


def test_every_room_has_a_fault() -> None:
    rooms = {folder.name for folder in (ROOT / "vitkit").iterdir() if (folder / "__init__.py").is_file()}
    assert rooms - {"jobs"} <= {planted.file.split("/")[0] for planted in FAULTS.values()}  # jobs join rooms


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS, ids=lambda name: f"{FAULTS[name].file}: {name}")
def test_a_fault_is_caught(name: str, tmp_path: Path) -> None:
    planted, copy = FAULTS[name], tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    file = copy / "vitkit" / planted.file
    file.write_text(file.read_text(encoding="utf-8").replace(planted.old, planted.new), encoding="utf-8")
    tests = [f"tests/{test}" for test in planted.tests]
    done = pytest_in(copy, "-x", *tests)
    assert done.returncode == 1, f"{name}: no test failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    shutil.copy(ROOT / "vitkit" / planted.file, file)
    done = pytest_in(copy, "--last-failed", *tests)
    assert done.returncode == 0, f"{name}: the test fails without the fault too\n{done.stdout[-2000:]}"
