"""Workers that fill shared slots: every task once and in order, and an end to every accident."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.data.images import encoded, picture
from vitkit.data import slots as module
from vitkit.data.decode import _quiet, decode
from vitkit.data.slots import Slots
from vitkit.errors import BadImage, LostWorker

Workers = Callable[[], list[multiprocessing.Process]]
pytestmark = pytest.mark.skipif(not module.available(), reason="processes are not forked here")


@pytest.fixture
def workers() -> Workers:
    """A function that returns the worker processes that this test has started and that are alive."""
    before = multiprocessing.active_children()
    return lambda: [process for process in multiprocessing.active_children() if process not in before]


def work(task: int, slot: np.ndarray) -> int:
    time.sleep(0.01 * (task % 3 == 0))  # so that some finish out of order
    slot[:] = task % 251
    return task * task


@pytest.mark.parametrize(("tasks", "count", "slots"), [(40, 3, 4), (40, 1, 1), (2, 4, 9), (7, 2, 40)])
def test_every_task_in_order_with_its_own_slot(tasks: int, count: int, slots: int, workers: Workers) -> None:
    with Slots(work, tasks, count, slots=slots, size=1000, pin=False) as pool:
        for task in range(tasks):
            result, slot = pool.take()
            assert (result, set(slot.tolist())) == (task * task, {task % 251})
            pool.release()
    assert not workers()


def test_a_slot_that_was_not_released_is_not_overwritten() -> None:
    with Slots(work, 20, 2, slots=5, size=10, pin=False) as pool:
        held = [pool.take()[1] for _ in range(4)]
        time.sleep(0.1)
        assert [int(slot[0]) for slot in held] == [0, 1, 2, 3]
        pool.release(4)
        for _ in range(16):
            pool.take()
            pool.release()


def test_an_error_in_a_worker_is_raised_where_its_result_is_taken(workers: Workers) -> None:
    def failing(task: int, slot: np.ndarray) -> int:
        if task == 2:
            raise BadImage("c.jpg: is torn.")
        return task

    with Slots(failing, 5, 2, slots=5, size=1, pin=False) as pool:
        assert [pool.take()[0] for _ in range(2)] == [0, 1]
        with pytest.raises(BadImage, match=r"c\.jpg: is torn"):
            pool.take()
    assert not workers()


def test_a_killed_worker_is_an_error_and_not_a_wait(workers: Workers) -> None:
    def dying(task: int, slot: np.ndarray) -> int:
        if task == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    def take_all(pool: Slots[int]) -> None:
        for _ in range(50):
            pool.take()
            pool.release()

    with (
        Slots(dying, 50, 2, slots=4, size=1, pin=False) as pool,
        pytest.raises(LostWorker, match="killed by SIGKILL"),
    ):
        take_all(pool)
    assert not workers()


def test_a_worker_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    """Another thread may be in the middle of decoding an image when workers are forked."""
    photo = encoded(picture(1))
    with _quiet(), Slots(lambda task, slot: decode(photo).size, 2, 1, slots=2, size=1, pin=False) as pool:
        assert [pool.take()[0] for _ in range(2)] == [picture(1).size] * 2


def test_a_worker_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, workers: Workers) -> None:
    monkeypatch.setattr(module, "TICK", 0.05)
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    with Slots(lambda task, slot: time.sleep(60), 2, 1, slots=1, size=1, pin=False) as pool:
        with pytest.raises(LostWorker, match="No worker process has sent images"):
            pool.take()
        assert not workers()


def test_workers_end_when_nobody_takes_anything(workers: Workers) -> None:
    pool = Slots(work, 100, 2, slots=2, size=1, pin=False)
    assert len(workers()) == 2
    del pool
    assert not workers()


def test_a_thread_that_waits_for_a_worker_can_be_stopped(workers: Workers) -> None:
    def hanging(task: int, slot: np.ndarray) -> int:
        time.sleep(60)
        return task

    with Slots(hanging, 3, 2, slots=3, size=1, pin=False) as pool, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pool.take)
        pool.stop()
        with pytest.raises(LostWorker):
            waiting.result(timeout=200)
    assert not workers()
