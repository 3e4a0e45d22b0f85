"""The arguments of `ckptctl elastic`; a module without NumPy, so that the other commands do not import it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["add_elastic_commands"]


def add_elastic_commands(parser: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommands `plan`, `show` and `whatif`."""
    commands = parser.add_subparsers(required=True, metavar="QUESTION", dest="question")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, parents=[*parents])
        sub.add_argument(
            "--layer",
            type=int,
            action="append",
            help="show the map of this layer (may be repeated)",
        )
        sub.add_argument(
            "--color",
            choices=("auto", "always", "never"),
            default="auto",
            help="use colors (default: if stdout is a terminal)",
        )
        return sub

    file_text = "JSON file with loads and nodes (docs/elastic.md, section 10); default: the running job"
    text = "plan a new placement of experts: maps, recovery, tokens and transfers"
    add("plan", text).add_argument("file", nargs="?", help=file_text)
    add("show", "show the placements that running jobs reported to this daemon")
    text = "predict the loss of nodes: the lost experts, their sources and the new placement"
    lost = add("whatif", text)
    lost.add_argument("file", nargs="?", help=file_text)
    lost.add_argument(
        "--lose",
        required=True,
        help="the lost nodes, by name or label: node=host-3,rack=A (nodes that match any of these)",
    )
