"""When to try again and when to stop: the pure rules, and `Resilient`, which applies them, with a
clock that is a number.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.storage.stores.objects import (
    Cancelled,
    CircuitOpen,
    NoSpace,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    Range,
    StoreError,
    StoreFacts,
    StoreRefused,
    Throttled,
    Unavailable,
)
from ckptd.storage.stores.open_store import open_store
from ckptd.storage.stores.resilience import (
    Backoff,
    Circuit,
    CircuitState,
    NoticeKind,
    Resilient,
    RetryPolicy,
    RetryTiming,
    StoreNotice,
)


class TestBackoff:
    @given(attempt=st.integers(0, 10_000), seed=st.integers())
    def test_between_nothing_and_a_doubling_ceiling(self, attempt: int, seed: int) -> None:
        delay_s = Backoff(0.5, 8.0, random.Random(seed)).delay_s(attempt)
        assert 0.0 <= delay_s <= min(8.0, 0.5 * 2 ** min(attempt, 10))

    def test_the_jitter_is_full(self) -> None:
        backoff = Backoff(1.0, 100.0, random.Random(1))
        delays = [backoff.delay_s(3) for _ in range(500)]
        assert min(delays) < 0.5
        assert max(delays) > 7.5


class TestRetryPolicy:
    def test_attempts_and_deadline(self) -> None:
        policy = RetryPolicy(attempts=3, deadline_s=10.0)
        assert policy.again(0, 0.0, 1.0)
        assert policy.again(1, 8.9, 1.0)
        assert not policy.again(2, 0.0, 0.0)
        assert not policy.again(1, 9.5, 0.5)

    @pytest.mark.parametrize(
        "wrong",
        [{"attempts": 0}, {"deadline_s": 0.0}, {"base_s": 0.0}, {"base_s": 9.0, "cap_s": 8.0}],
    )
    def test_impossible_ones(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="policy"):
            RetryPolicy(**wrong)  # type: ignore[arg-type]


class TestCircuit:
    def test_opens_after_failures_in_a_row_and_only_once(self) -> None:
        circuit = Circuit(threshold=3, open_s=10.0)
        assert [circuit.failed(0.0), circuit.failed(1.0)] == [False, False]
        circuit.succeeded()
        assert [circuit.failed(2.0), circuit.failed(3.0), circuit.failed(4.0)] == [
            False,
            False,
            True,
        ]
        assert not circuit.failed(5.0)
        assert circuit.state is CircuitState.OPEN
        assert not circuit.allows(13.9)
        assert circuit.wait_s(13.0) == 1.0

    def test_lets_one_call_through_and_closes_when_it_succeeds(self) -> None:
        circuit = Circuit(threshold=1, open_s=10.0)
        assert circuit.failed(0.0)
        assert [circuit.allows(10.0), circuit.allows(10.0), circuit.allows(11.0)] == [
            True,
            False,
            False,
        ]
        assert circuit.state is CircuitState.HALF_OPEN
        assert circuit.succeeded()
        assert circuit.allows(11.0)
        assert not circuit.succeeded()

    def test_stays_open_when_the_one_call_fails(self) -> None:
        circuit = Circuit(threshold=1, open_s=10.0)
        circuit.failed(0.0)
        assert circuit.allows(10.0)
        assert not circuit.failed(12.0)
        assert not circuit.allows(21.9)
        assert circuit.allows(22.0)

    def test_a_call_that_told_nothing_lets_the_next_one_through(self) -> None:
        circuit = Circuit(threshold=1, open_s=10.0)
        circuit.failed(0.0)
        assert circuit.allows(10.0)
        circuit.abandoned()
        assert circuit.allows(10.0)

    @given(st.lists(st.sampled_from(["ask", "fail", "succeed", "abandon", "wait"]), max_size=60))
    def test_whatever_happens_a_success_closes_it_and_time_gives_a_chance(self, steps: list[str]) -> None:
        circuit = Circuit(threshold=2, open_s=5.0)
        now_s = 0.0
        for step in steps:
            match step:
                case "ask":
                    circuit.allows(now_s)
                case "fail":
                    was = circuit.state
                    opened = circuit.failed(now_s)
                    assert opened == (was is CircuitState.CLOSED and circuit.state is CircuitState.OPEN)
                case "succeed":
                    was = circuit.state
                    assert circuit.succeeded() == (was is not CircuitState.CLOSED)
                    assert circuit.state.value == "closed"
                case "abandon":
                    circuit.abandoned()
                case _:
                    now_s += 3.0
        circuit.abandoned()
        assert circuit.allows(now_s + 5.0)

    def test_impossible_ones(self) -> None:
        for threshold, open_s in ((0, 1.0), (1, 0.0)):
            with pytest.raises(ValueError, match="circuit"):
                Circuit(threshold, open_s)


class Scripted:
    """A store in memory whose next calls end as a script says."""

    def __init__(self) -> None:
        self.inner: ObjectStore = open_store(f"memory://scripted-{random.getrandbits(64):x}")
        self.script: list[StoreError | Callable[[], None] | None] = []
        self.calls = 0
        self.lands = False

    def _next(self) -> None:
        self.calls += 1
        step = self.script.pop(0) if self.script else None
        if isinstance(step, BaseException):
            raise step
        if step is not None:
            step()

    @property
    def facts(self) -> StoreFacts:
        self._next()
        return self.inner.facts

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        try:
            self._next()
        except StoreError:
            if self.lands:
                self.inner.put(key, parts, if_absent=if_absent)
            raise
        return self.inner.put(key, parts, if_absent=if_absent)

    def read(self, key: str, *, limit: int) -> bytes:
        self._next()
        return self.inner.read(key, limit=limit)

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        self._next()
        self.inner.read_ranges(key, ranges)

    def info(self, key: str) -> ObjectInfo | None:
        self._next()
        return self.inner.info(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for info in self.inner.list(prefix):
            yield info
            self._next()

    def delete(self, keys: Sequence[str]) -> None:
        self._next()
        self.inner.delete(keys)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        self._next()
        return self.inner.abort_uploads(prefix, older_than_s)

    def close(self) -> None:
        self.inner.close()


class Setting:
    """A `Resilient` on a scripted store, with time that passes in its pauses only."""

    def __init__(self, policy: RetryPolicy | None = None, circuit: Circuit | None = None) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self.cancelled = False
        self.notices: list[StoreNotice] = []
        self.store = Scripted()
        self.resilient = Resilient(
            self.store,
            policy or RetryPolicy(attempts=4, deadline_s=100.0, base_s=1.0, cap_s=8.0),
            circuit or Circuit(threshold=100),
            url="memory://here",
            timing=RetryTiming(lambda: self.now_s, self._sleep, random.Random(5)),
            cancelled=lambda: self.cancelled,
            notify=self.notices.append,
        )

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def fails(self, *errors: StoreError) -> None:
        self.store.script = [*errors]

    def put(self, data: bytes, **how: bool) -> ObjectInfo:
        return self.resilient.put("key", [memoryview(data)], **how)


def unavailable() -> StoreError:
    return Unavailable("key", "is not reached")


class TestRetries:
    def test_what_is_retriable_is_tried_again(self) -> None:
        setting = Setting()
        setting.fails(unavailable(), Throttled("key", "slow down"), unavailable())
        assert setting.put(b"abc").size == 3
        assert setting.store.calls == 4
        assert len(setting.slept) == 3
        assert all(0 <= s <= 2**n for n, s in enumerate(setting.slept))
        assert setting.resilient.counters() == {"Unavailable": 2, "Throttled": 1}

    def test_what_is_not_is_not(self) -> None:
        for error in (
            StoreRefused("key", "no"),
            NoSpace("key", "full"),
            ObjectMissing("key", "none"),
        ):
            setting = Setting()
            setting.fails(error)
            with pytest.raises(type(error)):
                setting.resilient.read("key", limit=1)
            assert (setting.store.calls, setting.slept) == (1, [])

    def test_the_last_error_is_the_one_that_is_told(self) -> None:
        setting = Setting()
        setting.fails(*(Unavailable("key", f"number {n}") for n in range(9)))
        with pytest.raises(Unavailable, match="number 3"):
            setting.resilient.info("key")
        assert setting.store.calls == 4

    def test_no_attempt_begins_after_the_deadline(self) -> None:
        setting = Setting(RetryPolicy(attempts=1000, deadline_s=60.0, base_s=1.0, cap_s=8.0))
        setting.fails(*(unavailable() for _ in range(1000)))
        with pytest.raises(Unavailable):
            setting.resilient.delete(["key"])
        assert 50.0 < setting.now_s < 60.0

    def test_an_attempt_that_takes_long_counts_too(self) -> None:
        setting = Setting()

        def stall() -> None:
            setting.now_s += 101.0
            raise unavailable()

        setting.store.script = [stall]
        with pytest.raises(Unavailable):
            setting.resilient.info("key")
        assert setting.store.calls == 1

    def test_cancelling_takes_effect_between_attempts(self) -> None:
        setting = Setting()

        def cancel() -> None:
            setting.cancelled = True
            raise unavailable()

        setting.store.script = [unavailable(), cancel]
        with pytest.raises(Cancelled):
            setting.put(b"abc")
        assert setting.store.calls == 2
        with pytest.raises(Cancelled):
            setting.put(b"abc")
        assert setting.store.calls == 2

    def test_every_call_is_covered(self) -> None:
        setting = Setting()
        setting.put(b"abc")
        resilient = setting.resilient
        buffer = bytearray(2)
        calls: list[Callable[[], object]] = [
            lambda: resilient.facts,
            lambda: resilient.read("key", limit=3),
            lambda: resilient.read_ranges("key", [Range(1, memoryview(buffer))]),
            lambda: resilient.info("key"),
            lambda: [info.key for info in resilient.list("")],
            lambda: resilient.abort_uploads("", 0.0),
            lambda: resilient.delete(["key"]),
        ]
        expected = [
            setting.store.inner.facts,
            b"abc",
            None,
            setting.store.inner.info("key"),
            ["key"],
            -1,
            None,
        ]
        for call, answer in zip(calls, expected, strict=True):
            setting.fails(unavailable())
            assert call() == answer
            assert setting.store.script == []
        assert buffer == b"bc"
        assert setting.store.inner.info("key") is None
        resilient.close()

    def test_half_a_listing_is_none(self) -> None:
        setting = Setting()
        for key in ("a", "b", "c"):
            setting.store.inner.put(key, [memoryview(b"x")])
        setting.store.script = [None, unavailable()]
        assert [info.key for info in setting.resilient.list("")] == ["a", "b", "c"]
        setting.fails(*(unavailable() for _ in range(4)))
        with pytest.raises(Unavailable):
            setting.resilient.list("")


class TestLostAnswers:
    """A put that lands although nobody was told: the next attempt meets its object."""

    @pytest.mark.parametrize("size", [0, 3, 1 << 20, (1 << 20) + 1, 3 << 20])
    def test_our_own_object_is_a_success(self, size: int) -> None:
        setting = Setting()
        setting.store.lands = True
        setting.fails(unavailable())
        assert setting.put(random.Random(1).randbytes(size), if_absent=True).size == size

    @pytest.mark.parametrize("size", [3, 1 << 20, 3 << 20])
    @pytest.mark.parametrize("at", ["begin", "end", "size"])
    def test_somebody_elses_is_not(self, size: int, at: str) -> None:
        setting = Setting()
        ours = random.Random(1).randbytes(size)
        if at == "size":
            theirs = ours + b"!"
        else:
            index = 0 if at == "begin" else size - 1
            theirs = ours[:index] + bytes([ours[index] ^ 1]) + ours[index + 1 :]
        setting.store.inner.put("key", [memoryview(theirs)])
        setting.fails(unavailable())
        with pytest.raises(ObjectExists):
            setting.put(ours, if_absent=True)
        assert setting.store.inner.read("key", limit=len(theirs)) == theirs

    def test_who_meets_an_object_at_once_has_not_made_it(self) -> None:
        setting = Setting()
        setting.put(b"abc")
        with pytest.raises(ObjectExists):
            setting.put(b"abc", if_absent=True)

    def test_parts_of_any_cut_are_compared_at_both_ends(self) -> None:
        setting = Setting()
        setting.store.lands = True
        data = random.Random(2).randbytes(2 << 20)
        view = memoryview(data)
        cuts = [0, 1, 100, 70_000, (1 << 20) + 5, (2 << 20) - 70_000, (2 << 20) - 3, 2 << 20]
        parts = [view[a:b] for a, b in itertools.pairwise(cuts)]
        setting.fails(unavailable())
        assert setting.resilient.put("key", parts, if_absent=True).size == len(data)


class TestOpenCircuit:
    def _open(self) -> Setting:
        policy = RetryPolicy(attempts=10, deadline_s=1000.0, base_s=0.001, cap_s=0.001)
        setting = Setting(policy, Circuit(threshold=3, open_s=30.0))
        setting.fails(*(unavailable() for _ in range(10)))
        with pytest.raises(Unavailable):
            setting.put(b"abc")
        return setting

    def test_opens_and_says_so_once_and_the_call_that_met_it_ends(self) -> None:
        setting = self._open()
        assert setting.store.calls == 3
        assert [notice.kind for notice in setting.notices] == [NoticeKind.PAUSED]
        assert "memory://here" in setting.notices[0].text
        assert "3 failures" in setting.notices[0].text

    def test_a_prompt_view_shares_the_circuit_and_gives_up_earlier(self) -> None:
        setting = Setting(RetryPolicy(attempts=1000, deadline_s=600.0, base_s=1.0, cap_s=8.0))
        prompt = setting.resilient.within(30.0)
        setting.fails(*[unavailable()] * 500)
        with pytest.raises(Unavailable):
            prompt.info("key")
        assert setting.now_s < 30.0
        assert setting.resilient.counters()["Unavailable"] == setting.store.calls

    def test_calls_fail_at_once_while_it_is_open(self) -> None:
        setting = self._open()
        with pytest.raises(CircuitOpen) as caught:
            setting.resilient.info("key")
        assert caught.value.retriable
        assert setting.store.calls == 3
        assert len(setting.notices) == 1
        assert setting.resilient.counters() == {"Unavailable": 3, "CircuitOpen": 1}

    def test_closes_and_says_so_once(self) -> None:
        setting = self._open()
        setting.store.script = []
        setting.now_s += 31.0
        setting.put(b"abc")
        setting.put(b"abc")
        kinds = [notice.kind for notice in setting.notices]
        assert kinds == [NoticeKind.PAUSED, NoticeKind.RESUMED]

    def test_a_probe_that_fails_is_one_attempt_and_says_nothing(self) -> None:
        setting = self._open()
        setting.now_s += 31.0
        with pytest.raises(Unavailable):
            setting.put(b"abc")
        assert setting.store.calls == 4
        assert len(setting.notices) == 1

    def test_answers_that_nobody_likes_are_answers(self) -> None:
        setting = Setting(circuit=Circuit(threshold=2))
        for _ in range(10):
            setting.fails(StoreRefused("key", "no"))
            with pytest.raises(StoreRefused):
                setting.resilient.info("key")
        assert setting.notices == []

    def test_a_bug_during_the_probe_does_not_lock_the_circuit(self) -> None:
        setting = self._open()
        setting.now_s += 31.0
        setting.store.script = []
        with pytest.raises(ValueError, match="key"):
            setting.resilient.info("../no")
        assert setting.resilient.info("key") is None
