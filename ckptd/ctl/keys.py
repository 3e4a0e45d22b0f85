"""`ckptctl keys`: this node's key pair, and whom it trusts. Works on the folder; no daemon is asked.

A running daemon looks at the folder again when somebody unknown connects, so trusting a node needs no restart.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ckptd.config import load_config
from ckptd.transport.keys import Keys, KeysError, checked_key, trust, trusted

__all__ = ["add_keys_commands", "run_keys"]


def add_keys_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """The subcommands new, trust and list."""
    commands = parser.add_subparsers(required=True, metavar="ACTION")

    def add(name: str, text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text, parents=[common])
        sub.add_argument("--keys-dir", help="folder of the keys (default: as configured)")
        sub.set_defaults(action=name)
        return sub

    add("new", "make this node's key pair and print the public key")
    trusting = add("trust", "let a node connect to this one, and this one to it")
    trusting.add_argument("node", help="its node id")
    trusting.add_argument("key", help="its public key, or the file node.key that holds it")
    add("list", "this node's public key and the nodes it trusts")


def run_keys(args: argparse.Namespace) -> tuple[Any, str]:
    """Perform a subcommand; returns what it found, for ``--json`` and as text.

    Raises:
        KeysError: there is a key already, none at all, or something is no key.
    """
    folder = Path(args.keys_dir or load_config({}).config.keys_dir)
    if args.action == "new":
        public = Keys.create(folder).public
        return {"keys_dir": str(folder), "public_key": public}, public
    if args.action == "trust":
        key = _key_of(args.key)
        trust(folder, args.node, key)
        text = f"{args.node} is trusted, with key {key}"
        return {"keys_dir": str(folder), "node": args.node, "public_key": key}, text
    public = Keys.load(folder).public
    known = trusted(folder)
    lines = [f"this node: {public}", *(f"{node}: {key}" for node, key in sorted(known.items()))]
    return {"keys_dir": str(folder), "public_key": public, "trusted": known}, "\n".join(lines)


def _key_of(text: str) -> str:
    """A key as it stands, or the one in a certificate file."""
    path = Path(text)
    if not path.is_file():  # the characters of a key may look like a path
        return checked_key(text)
    for line in _read(path).splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and name.strip() == "public-key":
            return checked_key(value.strip().strip('"'))
    raise KeysError(f"{path} holds no public key")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"cannot read {path}: {error}") from error
