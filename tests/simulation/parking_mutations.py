"""Rules of parking, boundary logs and localized plans, each broken by itself, for
`tests.simulation.parking_world`.
"""

from __future__ import annotations

from typing import Any

from ckptd.client.parking.park_memory import ParkMemory
from ckptd.client.parking.parker import ParkGate
from ckptd.core.recovery import localized_plan
from ckptd.core.recovery.recovery_facts import Relations
from ckptd.core.slots.slots import SlotRecord
from tests.simulation.mutations import Mutation
from tests.simulation.parking_world import play_parking

__all__ = ["PARKING_MUTATIONS"]

_Inventory = localized_plan._RankInventory


def _nobody_went_on(self: ParkGate) -> bool:
    _end_copy(self)
    return False


_end_copy = ParkGate.end_copy


def _of_whatever_step(self: ParkGate, moment: object) -> bool:
    return self.moment is not None and _begin_copy(self, self.moment)


_begin_copy = ParkGate.begin_copy


def _the_newest_first(self: ParkMemory, segment: object, records: list[SlotRecord]) -> list[SlotRecord]:
    return sorted(records, key=lambda record: -record.sequence)


def _logs_like_snapshots(self: Any, *args: Any) -> None:
    _inventory(self, *args)
    self._log_limits = dict(self._limits)


_inventory = _Inventory.__init__

PARKING_MUTATIONS: dict[str, Mutation] = {
    "a torn copy is sealed": Mutation(
        "a copy for which the optimizer did not wait is discarded",
        ((ParkGate, "end_copy", _nobody_went_on),),
        play=play_parking,
    ),
    "a step that is over is parked": Mutation(
        "no copy of a step begins after its end",
        ((ParkGate, "begin_copy", _of_whatever_step),),
        play=play_parking,
    ),
    "the last parked state is overwritten": Mutation(
        "the last parked state stays until the next one is sealed",
        ((ParkMemory, "_in_order", _the_newest_first),),
        play=play_parking,
    ),
    "parked states go early": Mutation(
        "a parked state stays until the floor and the own suffix are beyond it",
        ((ParkMemory, "_outlived", lambda _: 1 << 40),),
        play=play_parking,
    ),
    "abandoned images count": Mutation(
        "what a later epoch left does not count",
        ((localized_plan, "stale_after", lambda _: {}),),
        play=play_parking,
    ),
    "logs are outdated like snapshots": Mutation(
        "a recovery outdates the logs of the iteration at which it goes on",
        ((_Inventory, "__init__", _logs_like_snapshots),),
        play=play_parking,
    ),
    "missing logs are not missed": Mutation(
        "whose log is missing starts earlier",
        ((_Inventory, "has_log", lambda *_: True),),
        play=play_parking,
    ),
    "any peer will do": Mutation(
        "a rank copies from a peer whose operators equal its own",
        ((Relations, "have_same_operators", lambda *_: True),),
        play=play_parking,
    ),
    "localized at any price": Mutation(
        "no localized plan goes on earlier than the global one",
        ((localized_plan, "_global_is_better", lambda *_: None),),
        play=play_parking,
    ),
}
