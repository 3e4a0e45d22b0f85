"""A session's listener that holds nothing and does not park."""

from __future__ import annotations

__all__ = ["SilentListener"]


class SilentListener:
    def held(self) -> tuple[int, ...]:
        return ()

    def while_lost(self) -> None:
        pass

    def asked_to_park(self, number: int) -> bool:
        return False
