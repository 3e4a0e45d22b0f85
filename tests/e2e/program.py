"""What the programs of two ranks, or of one, that tests kill have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

__all__ = ["Losses", "life_parser", "optimizer_state"]


def life_parser() -> argparse.ArgumentParser:
    """Arguments of one life; the program adds its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--daemon")
    parser.add_argument("--run")
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help="of two, which meet at --port")
    parser.add_argument("--port", type=int, default=0)
    return parser


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """Parameters and their state by position, and the groups."""
    found: dict[str, Any] = {}
    for at, param in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        found[f"optim/{at}"] = param.detach().clone()
        found.update({f"optim/{at}.{k}": v for k, v in optimizer.state[param].items()})
    found["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return found


class Losses:
    """A program's own log."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])
