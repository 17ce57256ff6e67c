from __future__ import annotations

import threading
from contextlib import closing, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.data.images import BAD, class_folder, encoded, odd_files, picture
from vitkit.data import Augment, EvalLoader, Mix, TrainLoader, augment, decode, open_source, preprocess, sample_rngs
from vitkit.data.ahead import THREADS, by_threads, made_ahead
from vitkit.data.base import Pixels
from vitkit.data.batch import images_per_batch
from vitkit.data.decode import digest
from vitkit.data.preprocess import normalize
from vitkit.errors import BadImage, ConfigError, DataError
from vitkit.model.config import InputSpec

SPEC = InputSpec(size=(32, 32))
STRONG = Augment(color_jitter=0.4, rand_layers=2, rand_magnitude=15, erase=0.5, erase_fill="noise")
MIX = Mix(mixup=0.8, cutmix=1.0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return open_source(class_folder(tmp_path_factory.mktemp("photos"), {"a": 20, "b": 31, "c": 9}), "all")


@pytest.fixture
def damaged(tmp_path):
    """Fifteen odd files, five of them unreadable, among ten good ones."""
    class_folder(tmp_path, {"good": 10})
    (tmp_path / "odd").mkdir()
    for name, data in odd_files().items():
        (tmp_path / "odd" / name).write_bytes(data)
    return open_source(tmp_path, "all")


def same(a, b):
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in ("pixels", "labels", "index", "others", "weight"))


@pytest.mark.parametrize("workers", [1, 4])
def test_the_same_bytes_for_any_number_of_workers(photos, workers):
    def run(count):
        loader = TrainLoader(photos, SPEC, STRONG, batch_size=50, seed=3, mix=MIX, workers=count)
        return list(loader.batches(0, 4))

    assert all(same(a, b) for a, b in zip(run(0), run(workers), strict=True))


class Tiny(Pixels):
    """Images in memory, so small that they travel in larger pieces; those in `broken` cannot be read."""

    def __init__(self, shape=(28, 28), broken=()):
        draw = np.random.default_rng(0)
        images, labels = draw.integers(0, 256, (400, *shape), dtype=np.uint8), draw.integers(0, 10, 400)
        super().__init__(images, labels, list("0123456789"))
        self.broken = broken

    def raw(self, i):
        if i in self.broken:
            raise BadImage(f"{self.names[i]}: broken.")
        return super().raw(i)


@pytest.mark.parametrize("mix", [None, MIX], ids=["none", "mix"])
@pytest.mark.parametrize("shape", [(28, 28), (32, 32, 3)], ids=["gray", "colour"])
def test_tiny_images_are_the_same_for_any_number_of_workers_and_each_as_if_alone(shape, mix):
    gray = len(shape) == 2
    spec = InputSpec(size=(28, 28), channels="gray", mean=(0.3,), std=(0.4,)) if gray else SPEC
    how = Augment(scale=(0.7, 1.0), erase=0.5)

    def run(workers, start=0):
        loader = TrainLoader(Tiny(shape), spec, how, batch_size=300, seed=3, mix=mix, workers=workers)
        return list(loader.batches(start, 4))

    here = run(0)
    assert all(same(a, b) for a, b in zip(here, run(2), strict=True))
    assert all(same(a, b) for a, b in zip(here[2:], run(1, 2), strict=True))
    if mix is None:
        source, loader = Tiny(shape), TrainLoader(Tiny(shape), spec, how, batch_size=300, seed=3)
        for x, (epoch, index) in zip(here[1].pixels, loader.rows(1), strict=True):
            image, _ = source.read(index)  # as Pillow has it, not as the array that the loader takes
            assert torch.equal(
                x, normalize(augment(image, spec, how, next(sample_rngs(3, [(epoch, index)])))[None], spec)[0]
            )


def test_workers_when_nobody_says_how_many(photos):
    assert TrainLoader(Tiny(), SPEC).workers == 0  # the CPU trains
    assert TrainLoader(Tiny(), SPEC, device="cuda").workers >= 1
    assert EvalLoader(Tiny(), SPEC, device="cuda").workers == 0
    assert TrainLoader(photos, SPEC).workers >= 1
    assert TrainLoader(photos, SPEC, device="cuda", workers=0).workers == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_tiny_images_that_are_bad_are_skipped(workers):
    broken = {3, 150, 151, 399}
    loader = TrainLoader(Tiny(broken=broken), SPEC, batch_size=300, workers=workers, bad_images="skip")
    seen = [i for batch in loader.batches(0, 3) for i in batch.index.tolist()]
    assert len(seen) == 900
    assert {loader.source.names[i] for i in broken} == set(loader.skipped)
    assert set(seen) == set(range(400)) - broken
    kept = [
        i
        for batch in EvalLoader(Tiny(broken=broken), SPEC, batch_size=300, workers=workers, bad_images="skip")
        for i in batch.index.tolist()
    ]
    assert kept == [i for i in range(400) if i not in broken]


def test_starting_at_a_step_is_having_come_there(photos):
    loader = TrainLoader(photos, SPEC, STRONG, batch_size=13, seed=1, mix=MIX, workers=0)
    all_of_them = list(loader.batches(0, 8))
    restarted = TrainLoader(photos, SPEC, STRONG, batch_size=13, seed=1, mix=MIX, workers=2)
    assert all(same(a, b) for a, b in zip(restarted.batches(5, 8), all_of_them[5:], strict=True))
    backwards = [next(loader.batches(step)) for step in (7, 2)]
    assert same(backwards[0], all_of_them[7])
    assert same(backwards[1], all_of_them[2])


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("mix", [Mix(), MIX, Mix(mixup=0.2), Mix(cutmix=1.0)], ids=["none", "both", "mixup", "cutmix"])
def test_processes_together_see_the_batch_of_one(photos, ranks, mix):
    def run(rank, of):
        return list(
            TrainLoader(photos, SPEC, STRONG, batch_size=16, seed=2, mix=mix, workers=0, rank=rank, ranks=of).batches(
                2, 5
            )
        )

    parts = [run(rank, ranks) for rank in range(ranks)]
    for step, whole in enumerate(run(0, 1)):
        joined = [part[step] for part in parts]
        for field in ("pixels", "labels", "index", "others", "weight"):
            assert torch.equal(torch.cat([getattr(p, field) for p in joined]), getattr(whole, field)), field


def test_a_sample_is_a_function_of_seed_epoch_and_index(photos):
    loader = TrainLoader(photos, SPEC, STRONG, batch_size=7, seed=9, workers=0)
    batch = next(loader.batches(10))
    for k, (epoch, index) in enumerate(loader.rows(10)):
        alone = augment(photos.raw(index), SPEC, STRONG, next(sample_rngs(9, [(epoch, index)])))
        assert torch.equal(batch.pixels[k], normalize(alone[None], SPEC)[0])
        assert batch.index[k] == index
        assert batch.labels[k] == photos.labels[index]


def test_global_generators_are_neither_read_nor_changed(photos):
    def run():
        return list(TrainLoader(photos, SPEC, STRONG, batch_size=30, seed=0, mix=MIX, workers=1).batches(0, 1))

    torch.manual_seed(1)
    np.random.seed(1)
    first, after = run(), torch.rand(3)
    torch.manual_seed(1)
    np.random.seed(7)
    assert torch.equal(after, torch.rand(3))
    assert same(first[0], run()[0])


def test_every_image_once_for_any_number_of_processes(photos):
    for ranks in (1, 2, 7, 61):
        seen = []
        for rank in range(ranks):
            loader = EvalLoader(photos, SPEC, batch_size=8, rank=rank, ranks=ranks, workers=0)
            batches = list(loader)
            assert len(batches) == len(loader)
            seen += [i for batch in batches for i in batch.index.tolist()]
        assert seen == list(range(60))


def test_evaluation_is_preprocess(photos):
    for workers in (0, 2):
        for batch in EvalLoader(photos, SPEC, batch_size=50, workers=workers):
            for x, index, label in zip(batch.pixels, batch.index.tolist(), batch.labels, strict=True):
                assert torch.equal(x, preprocess(decode(photos.raw(index)), SPEC))
                assert label == photos.labels[index]


@pytest.mark.parametrize("shared", [True, False])
def test_evaluation_is_the_same_with_and_without_shared_memory(damaged, shared, monkeypatch):
    """Where processes are not forked, pixels are sent."""
    expected = list(EvalLoader(damaged, SPEC, batch_size=7, workers=0, bad_images="skip", hashed=True))
    if not shared:
        monkeypatch.setattr("vitkit.data.slots.available", lambda: False)
    found = list(EvalLoader(damaged, SPEC, batch_size=7, workers=2, bad_images="skip", hashed=True))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.index, other.index)
        assert np.array_equal(one.digests, other.digests)
        assert np.array_equal(one.digests, [digest(damaged.raw(int(i))) for i in one.index])


@pytest.mark.parametrize("workers", [0, 2])
def test_fail_names_the_first_bad_image(damaged, workers):
    with pytest.raises(BadImage, match=r"^odd/bomb\.png: declares more than 178 megapixels .*`vitkit doctor`"):
        list(EvalLoader(damaged, SPEC, workers=workers))
    with pytest.raises(BadImage, match=r"^odd/\w+\.\w+: "):
        list(TrainLoader(damaged, SPEC, batch_size=8, workers=workers).batches(0, 4))


@pytest.mark.parametrize("workers", [0, 2])
def test_skip_leaves_bad_images_out_of_evaluation_and_names_each_once(damaged, workers):
    told = []
    loader = EvalLoader(
        damaged, SPEC, batch_size=4, workers=workers, bad_images="skip", on_bad=lambda name, why: told.append(name)
    )
    seen = [i for batch in loader for i in batch.index.tolist()]
    assert {damaged.names[i] for i in seen} == {n for n in damaged.names if n.partition("/")[2] not in BAD}
    assert len(seen) == len(set(seen)) == 20
    assert sorted(told) == sorted(loader.skipped) == sorted(f"odd/{name}" for name in BAD)
    assert all(name in why for name, why in loader.skipped.items())


def test_skip_fills_training_batches_with_readable_images(damaged):
    def run(workers, ranks=1, rank=0):
        loader = TrainLoader(
            damaged,
            SPEC,
            STRONG,
            batch_size=10,
            seed=4,
            mix=MIX,
            workers=workers,
            bad_images="skip",
            rank=rank,
            ranks=ranks,
        )
        return list(loader.batches(0, 6)), loader.skipped

    batches, skipped = run(0)
    assert {len(b) for b in batches} == {10}
    assert set(skipped) == {f"odd/{name}" for name in BAD}
    bad = {i for i, name in enumerate(damaged.names) if name in skipped}
    assert not bad & {i for b in batches for i in b.index.tolist()}
    assert all(b.pixels.flatten(1).std(1).min() > 0 for b in batches)  # none is black
    assert all(same(a, b) for a, b in zip(batches, run(2)[0], strict=True))
    halves = [run(0, 2, rank)[0] for rank in range(2)]
    for step, whole in enumerate(batches):
        assert torch.equal(torch.cat([half[step].pixels for half in halves]), whole.pixels)


def test_nothing_readable_is_an_error_not_a_loop(tmp_path):
    (tmp_path / "a").mkdir()
    for n in range(3):
        (tmp_path / "a" / f"{n}.jpg").write_bytes(b"no")
    source = open_source(tmp_path, "all")
    with pytest.raises(DataError, match="No image in the data set can be read"):
        next(TrainLoader(source, SPEC, batch_size=2, workers=0, bad_images="skip").batches())
    assert list(EvalLoader(source, SPEC, workers=0, bad_images="skip")) == []


def test_mixing_is_visible_in_targets_and_pixels(photos):
    plain = next(TrainLoader(photos, SPEC, batch_size=12, seed=5, workers=0).batches(3))
    assert torch.equal(plain.targets(3), torch.nn.functional.one_hot(plain.labels, 3).float())
    mixed = next(TrainLoader(photos, SPEC, batch_size=12, seed=5, mix=Mix(mixup=1.0), workers=0).batches(3))
    assert sorted(mixed.index.tolist()) == sorted(plain.index.tolist())
    assert torch.allclose(mixed.targets(3, 0.1).sum(1), torch.ones(12))
    weight = mixed.weight[0].item()
    assert 0 < weight < 1
    where = {i: k for k, i in enumerate(plain.index.tolist())}
    ordered = plain.pixels[[where[i] for i in mixed.index.tolist()]]
    for k in range(0, 12, 2):
        expected = ordered[k] * weight + ordered[k + 1] * (1 - weight)
        assert torch.allclose(mixed.pixels[k], expected, atol=1e-6)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"workers": -1}, {"bad_images": "ignore"}, {"rank": 1}, {"batch_size": 1, "ranks": 2}]
)
def test_nonsense_is_refused(photos, wrong):
    with pytest.raises(ConfigError):
        TrainLoader(photos, SPEC, **wrong)


def test_leaving_early_ends_the_workers(photos):
    import multiprocessing

    processes, threads = multiprocessing.active_children(), threading.enumerate()  # of other tests
    for batch in TrainLoader(photos, SPEC, batch_size=8, workers=2):
        assert len(batch) == 8
        break
    del batch
    for one in {*multiprocessing.active_children()} - {*processes} | {*threading.enumerate()} - {*threads}:
        one.join(200)
        assert not one.is_alive()


def test_gray_models_take_colour_files_and_the_reverse(photos):
    gray = InputSpec(size=(16, 16), channels="gray", mean=(0.5,), std=(0.5,))
    assert next(TrainLoader(photos, gray, STRONG, batch_size=4, workers=0).batches()).pixels.shape == (4, 1, 16, 16)
    digits = open_source("digits")
    assert next(TrainLoader(digits, SPEC, STRONG, batch_size=4).batches()).pixels.shape == (4, 3, 32, 32)
    assert TrainLoader(digits, SPEC).workers == 0


def test_a_batch_may_be_larger_than_the_data(tmp_path):
    source = open_source(class_folder(tmp_path, {"a": 3, "b": 2}), "all")
    batch = next(TrainLoader(source, SPEC, batch_size=12, workers=0).batches())
    assert len(batch) == 12
    assert np.bincount(batch.index.numpy()).min() >= 2


def test_bytes_do_not_depend_on_the_name(tmp_path):
    data = encoded(picture(1))
    a, b = (augment(data, SPEC, STRONG, next(sample_rngs(0, [(0, 0)])), name) for name in ("x", "y"))
    assert torch.equal(a, b)


def test_large_batches_on_cuda_alone():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert images_per_batch(None, InputSpec(size=(224, 224)), cuda) == 256
    assert images_per_batch(None, InputSpec(size=(224, 384)), cuda) == 64
    assert images_per_batch(None, InputSpec(size=(224, 224)), cpu) == 64
    assert images_per_batch(5, InputSpec(size=(224, 224)), cuda) == 5


@pytest.fixture
def no_cuda(monkeypatch):
    """Stand-ins for streams, so that what runs beside a GPU runs without one."""
    stream = SimpleNamespace(record_event=lambda: "event", wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_batches_made_ahead_keep_their_order_and_end_with_their_reader(no_cuda, taken):
    stopped, closed, threads = threading.Event(), threading.Event(), set()

    def made():
        try:
            for n in range(5):
                threads.add(threading.current_thread())
                if n > taken + 1 and taken:
                    stopped.wait(10)  # as `Slots.take` waits for a worker
                yield None, [(n, "unread")]
        finally:
            closed.set()

    ahead = made_ahead(made(), torch.device("cuda"), stopped.set)
    found = [next(ahead) for _ in range(taken)]
    assert found == [(None, [(n, "unread")]) for n in range(taken)]
    if taken == 5:
        assert list(ahead) == []
    ahead.close()
    if taken:
        assert stopped.is_set()
        assert closed.is_set()
        assert threading.current_thread() not in threads
        assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("taken", [1, 4, 9])
def test_two_threads_in_a_row_keep_the_order_and_end_with_their_reader(no_cuda, taken):
    stopped, closed, threads = threading.Event(), [], {"first": set(), "second": set()}

    def decoded():
        try:
            for n in range(9):
                threads["first"].add(threading.current_thread())
                if n > taken + 5:
                    stopped.wait(10)  # as `Slots.take` waits for a worker
                yield n
        finally:
            closed.append("first")

    def resized(found):
        try:
            with closing(found):
                for n in found:
                    threads["second"].add(threading.current_thread())
                    yield -n
        finally:
            closed.append("second")

    device = torch.device("cuda")
    ahead = made_ahead(resized(made_ahead(decoded(), device, stopped.set)), device, stopped.set)
    assert [next(ahead) for _ in range(taken)] == [-n for n in range(taken)]
    if taken == 9:
        assert list(ahead) == []
    ahead.close()
    assert closed == ["first", "second"]
    assert len(threads["first"]) == len(threads["second"]) == 1
    assert not threads["first"] & threads["second"]
    assert not any(thread.is_alive() for of in threads.values() for thread in of)


def test_an_error_of_a_batch_made_ahead_is_raised_in_its_place(no_cuda):
    def made():
        yield None, []
        raise BadImage("image 1: broken")

    ahead = made_ahead(made(), torch.device("cuda"), lambda: None)
    assert next(ahead) == (None, [])
    with pytest.raises(BadImage, match="image 1: broken"):
        next(ahead)


def test_threads_give_the_same_batches_as_none(photos, damaged, monkeypatch):
    for source in (photos, damaged):
        expected = list(here := EvalLoader(source, SPEC, batch_size=13, workers=0, bad_images="skip", hashed=True))
        with monkeypatch.context() as patch:
            patch.setattr(EvalLoader, "_reads_by_threads", lambda self: True)
            patch.setattr("vitkit.data.eval_loader.THREAD_PIECE", 3)
            found = list(there := EvalLoader(source, SPEC, batch_size=13, workers=0, bad_images="skip", hashed=True))
        assert all(same(a, b) and np.array_equal(a.digests, b.digests) for a, b in zip(found, expected, strict=True))
        assert there.skipped == here.skipped


def test_threads_read_only_a_little_ahead():
    began = []
    results = by_threads(lambda task: began.append(task) or task, range(10**9))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    results.close()
    assert len(began) <= 3 + 2 * THREADS
