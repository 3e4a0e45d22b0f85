"""What `ckptctl elastic` takes; apart from what it does, so that `ckptctl` needs no NumPy for anything else."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["add_elastic_commands"]


def add_elastic_commands(
    parser: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser]
) -> None:
    """`plan`, `show` and `whatif`."""
    commands = parser.add_subparsers(required=True, metavar="QUESTION", dest="question")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, parents=[*parents])
        sub.add_argument(
            "--layer", type=int, action="append", help="show this layer's map (may be repeated)"
        )
        sub.add_argument(
            "--color",
            choices=("auto", "always", "never"),
            default="auto",
            help="default: on a terminal",
        )
        return sub

    file_text = "loads and nodes as JSON (docs/elastic.md, section 10); default: of the running job"
    text = "where experts would be placed now: maps, recovery, tokens, and what would move"
    add("plan", text).add_argument("file", nargs="?", help=file_text)
    add("show", "where the experts of running jobs are, as they told this daemon")
    text = "what the loss of nodes would mean: which experts, from where, placed how"
    lost = add("whatif", text)
    lost.add_argument("file", nargs="?", help=file_text)
    lost.add_argument(
        "--lose", required=True, help="nodes, by name or label: node=host-3,rack=A (any of them)"
    )
