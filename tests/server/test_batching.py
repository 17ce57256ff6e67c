from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitkit.errors import Busy
from vitkit.server.batching import Batcher


class Recorder:
    """Doubles numbers, once it may, and remembers the batches."""

    def __init__(self, *, held: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()
        if not held:
            self.go.set()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        assert self.go.wait(60)
        return [2 * item for item in items]


def make(run: object, **how: object) -> Batcher[int, int]:
    return Batcher(run, **{"max_batch": 4, "max_delay": 0.5, "max_queue": 100} | how)  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.001)


def ask(batcher: Batcher[int, int], item: int) -> int:
    with batcher.reserve() as submit:
        return submit(item).result(timeout=60)


def test_one_alone_does_not_wait() -> None:
    """With a delay far beyond the time limit of `ask`, an answer means that nothing was waited for."""
    batcher = make(Recorder(), max_delay=3600.0)
    assert ask(batcher, 21) == 42
    batcher.close()


def test_what_is_reserved_shares_a_batch() -> None:
    run = Recorder()
    batcher = make(run, max_delay=3600.0)
    with batcher.reserve(3) as submit:
        answers = [submit(i) for i in range(2)]
        time.sleep(0.1)
        assert run.batches == []  # the third is expected
        answers.append(submit(2))
        assert [one.result(60) for one in answers] == [0, 2, 4]
    assert run.batches == [[0, 1, 2]]
    batcher.close()


def test_what_is_reserved_is_waited_for_up_to_the_delay() -> None:
    run = Recorder()
    batcher = make(run, max_delay=0.05)
    with batcher.reserve(2) as submit:
        assert submit(1).result(60) == 2  # the second never comes
    assert batcher.held == batcher.coming == 0
    batcher.close()


def test_one_who_gives_up_is_not_waited_for() -> None:
    batcher = make(Recorder(), max_delay=3600.0)
    with batcher.reserve() as submit:
        with batcher.reserve():  # reserved, then its image turned out to be broken
            answer = submit(5)
        assert answer.result(60) == 10
    batcher.close()


def test_what_takes_long_is_not_waited_for() -> None:
    batcher = make(Recorder(), max_delay=3600.0)
    with batcher.reserve(3) as late:
        late.expect(0)
        assert ask(batcher, 5) == 10
        assert late(1).result(60) == 2
    assert batcher.held == batcher.coming == 0
    batcher.close()


def test_of_a_reservation_a_part_may_be_expected() -> None:
    run = Recorder()
    batcher = make(run, max_delay=3600.0)
    with batcher.reserve(3) as submit:
        submit.expect(2)
        answers = [submit(1)]
        assert batcher.coming == 2  # two are left, and both may be the ones that come soon
        answers.append(submit(2))
        assert batcher.coming == 1
        answers.append(submit(3))
        assert [one.result(60) for one in answers] == [2, 4, 6]
    assert run.batches == [[1, 2, 3]]
    assert batcher.held == batcher.coming == 0
    batcher.close()


def test_many_share_batches_while_the_model_runs() -> None:
    """Seventeen: the first batch holds one to eight of them, and the others are two batches, whatever its size."""
    run = Recorder(held=True)
    batcher = make(run, max_batch=8)
    with ThreadPoolExecutor(17) as pool:
        answers = pool.map(lambda i: ask(batcher, i), range(17))
        until(lambda: len(run.batches) == 1 and len(run.batches[0]) + len(batcher._waiting) == 17)
        run.go.set()
        assert list(answers) == [2 * i for i in range(17)]
    assert sorted(item for batch in run.batches for item in batch) == list(range(17))
    assert [len(batch) for batch in run.batches[1:]] == [8, 9 - len(run.batches[0])]
    batcher.close()


def test_clients_that_come_back_share_a_batch_again() -> None:
    """Without the short wait, the first to come back would run alone and the others after it."""
    run = Recorder()
    batcher = make(run, max_delay=3600.0)
    with batcher.reserve(3) as submit:
        first = [submit(i) for i in range(3)]
        assert [one.result(60) for one in first] == [0, 2, 4]
    with contextlib.ExitStack() as stack:  # each in a request of its own: nothing else is reserved
        second = [stack.enter_context(batcher.reserve())(5)]
        time.sleep(0.1)
        assert run.batches == [[0, 1, 2]]  # two more are expected
        second += [stack.enter_context(batcher.reserve())(i) for i in (6, 7)]
        assert [one.result(60) for one in second] == [10, 12, 14]
    assert run.batches == [[0, 1, 2], [5, 6, 7]]
    batcher.close()


def test_clients_that_do_not_come_back_are_waited_for_once() -> None:
    """After a batch of three, one lone client waits for max_delay; after its batch of one, it does not wait at all."""
    run = Recorder()
    batcher = make(run, max_delay=3600.0)
    with batcher.reserve(3) as submit:
        wait([submit(i) for i in range(3)])
    batcher.max_delay = 0.05
    assert ask(batcher, 5) == 10  # alone: the delay ended
    batcher.max_delay = 3600.0
    assert ask(batcher, 6) == 12  # would time out if two more were still expected
    assert run.batches == [[0, 1, 2], [5], [6]]
    batcher.close()


def test_late_clients_are_not_waited_for() -> None:
    """The short wait is over for a client who comes later than max_delay after the last batch."""
    batcher = make(Recorder(), max_delay=3600.0)
    with batcher.reserve(3) as submit:
        wait([submit(i) for i in range(3)])
    batcher._ended -= 3601.0
    assert ask(batcher, 5) == 10
    batcher.close()


def test_a_full_queue_says_busy_and_recovers() -> None:
    run = Recorder(held=True)
    batcher = make(run, max_queue=3)
    with batcher.reserve(3) as submit:
        answers = [submit(i) for i in range(3)]
        busy = r"3 images are waiting and the limit is 3\. Try again in \d+ s"
        with pytest.raises(Busy, match=busy), batcher.reserve():
            pass
        run.go.set()
        wait(answers)
    assert ask(batcher, 1) == 2
    batcher.close()


def test_an_error_in_the_model_is_raised_to_those_who_wait() -> None:
    def run(items: Sequence[int]) -> list[int]:
        if 13 in items:
            raise RuntimeError("no")
        return list(items) if 14 not in items else []

    batcher = make(run)
    with pytest.raises(RuntimeError, match="no"):
        ask(batcher, 13)
    with pytest.raises(ValueError, match="shorter"):  # a result is missing
        ask(batcher, 14)
    assert ask(batcher, 1) == 1
    batcher.close()


def test_close_answers_what_was_accepted() -> None:
    batcher = make(Recorder(), max_batch=2)
    found: list[int] = []

    def late() -> None:
        with batcher.reserve(6) as submit:
            started.set()
            until(lambda: batcher._closed)  # still decoding when close is called
            found.extend(one.result(60) for one in [submit(i) for i in range(6)])

    started, thread = threading.Event(), threading.Thread(target=late)
    thread.start()
    started.wait()
    batcher.close()
    thread.join()
    assert found == [0, 2, 4, 6, 8, 10]
    with pytest.raises(Busy, match="stopping"), batcher.reserve():
        pass


def test_a_cancelled_item_is_skipped() -> None:
    run = Recorder(held=True)
    batcher = make(run, max_batch=1)
    with batcher.reserve(3) as submit:
        first, second, third = (submit(i) for i in range(3))
        assert second.cancel()
        run.go.set()
        assert (first.result(60), third.result(60)) == (0, 4)
    assert run.batches == [[0], [2]]
    batcher.close()


@settings(deadline=None, max_examples=25)
@given(
    requests=st.lists(st.integers(1, 5), min_size=1, max_size=20),
    max_batch=st.integers(1, 9),
    workers=st.integers(1, 6),
)
def test_every_item_gets_its_own_answer(requests: list[int], max_batch: int, workers: int) -> None:
    run = Recorder()
    batcher = make(run, max_batch=max_batch, max_delay=0.002)

    def one(number: int) -> list[int]:
        with batcher.reserve(requests[number]) as submit:
            return [a.result(60) for a in [submit(100 * number + i) for i in range(requests[number])]]

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(one, range(len(requests))))
    batcher.close()
    assert found == [[2 * (100 * n + i) for i in range(count)] for n, count in enumerate(requests)]
    assert all(len(batch) <= max_batch for batch in run.batches)
    assert batcher.held == batcher.coming == 0
