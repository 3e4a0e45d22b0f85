"""A seeded storm: trainers come, fill, leave and vanish while the daemon is killed again and again.

After each storm the daemon must be whole: it answers, counts its memory right, and every slot that
was ever filled and not overwritten is sealed, with digests that verify. `CKPTD_STORM_SEEDS` raises
the number of storms.
"""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import pytest

from ckptd.config.daemon_config import endpoint_for
from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import Segment, open_segment
from ckptd.storage.image import verify
from ckptd.transport import messages as m
from ckptd.transport.wire import ControlClient, RefusedError, RequestTimeout
from tests.ckptd.running import (
    MIB,
    DaemonProcess,
    attach,
    eventually,
    fill,
    own,
    reserve,
    running_daemon,
    state_of,
)

SEEDS = range(int(os.environ.get("CKPTD_STORM_SEEDS", "1")))
STEPS = 60
RANKS = 3


class Trainer:
    """One rank that behaves, on a connection that may break at any time."""

    def __init__(self, daemon: DaemonProcess, rank: int) -> None:
        self._daemon, self._rank = daemon, rank
        self._client = ControlClient(endpoint_for(str(daemon.runtime_dir)), timeout_s=5)
        self._iteration = 0
        self._owner_fds: dict[int, int] = {}
        self.segments: list[Segment] = []

    def attach(self) -> None:
        held = tuple(self._owner_fds)
        attached = attach(self._client, rank=self._rank, world_size=1, needed_bytes=4 * MIB, held=held)
        known = {segment.generation for segment in self.segments}
        assert {info.generation for info in attached.segments} >= known

    def reserve(self) -> None:
        if len(self.segments) < 2:
            segment = reserve(self._client, slots=3, slot_bytes=MIB // 4, rank=self._rank)
            self.segments.append(segment)
            self._owner_fds[segment.generation] = own(segment)

    def fill(self, source: random.Random, *, announce: bool) -> None:
        for segment in self.segments[-1:]:
            index = source.randrange(3)
            if state_of(segment, index) in (SlotState.FREE, SlotState.SEALED):
                self._iteration += 1
                fill(segment, index, self._iteration)
                if announce:
                    self._client.send(m.Filled(segment.generation, index, self._iteration))

    def drop(self) -> None:
        if len(self.segments) == 2:
            self._client.request(m.Drop(self.segments[0].generation))
            self._let_go(self.segments.pop(0))

    def vanish(self) -> None:
        """As if killed: locks go, nothing is said; then a successor starts."""
        for segment in list(self.segments):
            self._let_go(segment)
        self._client.close()
        self._client = ControlClient(endpoint_for(str(self._daemon.runtime_dir)), timeout_s=5)
        attached = attach(self._client, rank=self._rank, needed_bytes=4 * MIB)
        self.segments = [open_segment(Path(info.path)) for info in attached.segments]
        self._owner_fds = {segment.generation: own(segment) for segment in self.segments}

    def close(self) -> None:
        for segment in list(self.segments):
            self._let_go(segment)
        self._client.close()

    def _let_go(self, segment: Segment) -> None:
        os.close(self._owner_fds.pop(segment.generation))
        segment.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_leaves_a_whole_daemon(seed: int) -> None:
    source = random.Random(seed)
    with running_daemon(scrub_interval_s="0.5") as daemon:
        trainers = [Trainer(daemon, rank) for rank in range(RANKS)]
        try:
            for _ in range(STEPS):
                _one_step(source, daemon, source.choice(trainers))
            if source.random() < 0.5:
                daemon.kill()
                daemon.start()
            _check(daemon, trainers)
        finally:
            for trainer in trainers:
                trainer.close()


def _one_step(source: random.Random, daemon: DaemonProcess, trainer: Trainer) -> None:
    action = source.choices(
        ["fill", "fill_silently", "reserve", "drop", "attach", "vanish", "kill_daemon"],
        [30, 10, 10, 5, 10, 5, 3],
    )[0]
    if action == "kill_daemon":
        daemon.kill()
        trainer.fill(source, announce=False)
        daemon.start()
        return
    try:
        match action:
            case "fill" | "fill_silently":
                trainer.fill(source, announce=action == "fill")
            case "reserve":
                trainer.reserve()
            case "drop":
                trainer.drop()
            case "attach":
                trainer.attach()
            case "vanish":
                trainer.vanish()
    except RefusedError as error:
        if error.code != "no_session":
            raise
        trainer.attach()  # the daemon was killed since
    except RequestTimeout:
        trainer.attach()


def _rests(segment: Segment, index: int) -> bool:
    return state_of(segment, index) in (SlotState.FREE, SlotState.SEALED)


def _check(daemon: DaemonProcess, trainers: list[Trainer]) -> None:
    for trainer in trainers:
        for segment in trainer.segments:
            for index in range(segment.geometry.num_slots):
                eventually(
                    partial(_rests, segment, index),
                    f"slot {index} of {segment.path.name} came to rest",
                )
                header = segment.header(index)
                assert header is not None
                if header.state is SlotState.SEALED:
                    verify(segment.image(index, header), header.header_digest)
    with daemon.client() as client:
        status = client.ask(m.GetStatus(), m.Status)
        on_disk = sum(path.stat().st_size for path in daemon.segment_dir.glob("*.seg"))
        assert status.used_bytes == on_disk == sum(s.total_bytes for s in status.segments)
        assert not list(daemon.segment_dir.glob("*.bad"))
        bad = {"internal", "slot_damaged", "slot_quarantined", "seal_failed", "scrub_failed"}
        events = client.ask(m.GetEvents(limit=10_000), m.Events).events
        assert [event for event in events if event.kind in bad] == []
    assert "Traceback" not in daemon.log_text()
