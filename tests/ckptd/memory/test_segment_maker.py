"""Making segments: what is admitted, promised, built, entered, cancelled, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ckptd.core.sessions import AttachWish, RankKey
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_maker import SegmentMaker
from ckptd.memory.segment_store import Purpose, SegmentPlan, SegmentStore
from ckptd.transport.messages import RefusalCode, Refused
from ckptd.workers import Workers
from tests.ckptd.running import MIB, descriptor, eventually

READER = AttachWish(RankKey("job", "run", 3), 4, "", 1, 0, "")


@dataclass
class Setting:
    store: SegmentStore
    workers: Workers
    events: EventLog = field(default_factory=lambda: EventLog(100))
    made: list[Segment] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.maker = SegmentMaker(self.store, self.events, self.workers)

    def plan(self, purpose: Purpose, slots: int = 2) -> SegmentPlan:
        found = self.store.plan(descriptor(), slots, MIB)
        reader = READER if purpose is Purpose.COPY else None
        path = found.path.with_suffix(f".{purpose}")
        return replace(found, purpose=purpose, path=path, reader=reader, number=7)

    def make(self, plan: SegmentPlan) -> Refused | None:
        return self.maker.make(plan, made=self.made.append, refused=self.refused.append)

    def ended(self) -> bool:
        self.workers.collect()
        return bool(self.made or self.refused)

    def told(self) -> list[str]:
        return [event.kind for event in self.events.page(0, 100).events]


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    folder = tmp_path / "segments"
    folder.mkdir()
    workers = Workers("test", 1, 1, lambda: None)
    yield Setting(SegmentStore(folder, 16 * MIB, "n", mlock="off", hugepages="off"), workers)
    workers.close(5.0)


@pytest.mark.parametrize("purpose", Purpose)
def test_memory_of_every_purpose_counts_from_the_promise_until_it_is_given_back(
    setting: Setting, purpose: Purpose
) -> None:
    """What a copy or a replica had yet to allocate was counted in some of the numbers only."""
    store, plan = setting.store, setting.plan(purpose)
    charged = plan.charged_to
    assert setting.make(plan) is None
    total = plan.geometry.total_bytes
    facts = {fact.key: fact.total_bytes for fact in store.facts()}
    assert facts == ({} if charged is None else {charged: total})
    assert store.used_bytes == total
    assert store.memory.replica_bytes == (total if charged is None else 0)
    eventually(setting.ended, "it is built")
    (segment,) = setting.made
    assert store.all_for(purpose) == [segment]
    assert store.named(plan.path.name, purpose) is segment
    assert store.everything() == ([segment] if purpose is Purpose.RANK else [])
    assert (segment.detached_at_s is not None) is (purpose is Purpose.RANK)
    assert store.used_bytes == segment.file_bytes == plan.path.stat().st_size
    setting.maker.give_back(segment)
    assert (store.used_bytes, store.facts(), plan.path.exists()) == (0, [], False)
    eventually(lambda: bool(setting.ended()) and segment.fd < 0, "a worker closes it")
    assert setting.told() == []


@pytest.mark.parametrize(
    ("purpose", "kind"),
    [
        (Purpose.RANK, ["refused.quota"]),
        (Purpose.COPY, ["refused.quota"]),
        (Purpose.REPLICA, ["replica_refused"]),
        (Purpose.DRILL, []),
    ],
)
def test_what_finds_no_room_is_refused_at_once(setting: Setting, purpose: Purpose, kind: list[str]) -> None:
    refused = setting.make(setting.plan(purpose, slots=20))
    assert refused is not None
    assert refused.code == RefusalCode.QUOTA
    assert "22 MiB" in refused.message
    assert setting.store.used_bytes == 0
    assert setting.told() == kind
    assert not setting.ended()


def test_what_was_promised_to_ranks_is_not_for_replicas(setting: Setting) -> None:
    setting.store.promised = lambda: {READER.key: 15 * MIB}
    refused = setting.make(setting.plan(Purpose.REPLICA))
    assert refused is not None
    assert "15 MiB is promised to its own ranks" in refused.message
    assert setting.make(setting.plan(Purpose.COPY)) is None, "it is a part of the promise"


def test_a_worker_that_is_not_free_leaves_nothing_promised(setting: Setting) -> None:
    assert setting.make(setting.plan(Purpose.RANK)) is None
    used = setting.store.used_bytes
    refused = setting.make(setting.plan(Purpose.REPLICA))
    assert refused is not None
    assert refused.code == RefusalCode.IN_USE
    assert setting.store.used_bytes == used
    eventually(setting.ended, "the first one is built")


def test_what_cannot_be_built_is_cancelled_and_told(setting: Setting) -> None:
    plan = setting.plan(Purpose.COPY)
    plan = replace(plan, path=plan.path.parent / "no" / plan.path.name)
    assert setting.make(plan) is None
    eventually(setting.ended, "it fails")
    (refused,) = setting.refused
    assert refused.code == RefusalCode.SEGMENT_FS
    assert setting.store.used_bytes == 0
    assert setting.told() == ["refused.segment_fs"]
