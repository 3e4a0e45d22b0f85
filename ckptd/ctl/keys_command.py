"""`ckptctl keys`: manage this node's key pair and its trusted nodes. Edits the folder; needs no daemon.

A running daemon reads the folder again when an unknown node connects, and checks the keys of
connected nodes once a second. Trusting a node, or ending that trust, needs no restart; a new key
pair of this node does.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from ckptd.config.daemon_config import load_config
from ckptd.storage.checkpoints.signing import create_signer, trust_signer
from ckptd.transport.access.keys import (
    Keys,
    KeysError,
    TrustedKey,
    checked_key,
    trust,
    trusted,
    trusted_keys,
    untrust,
)
from ckptd.units import format_age

__all__ = ["add_keys_commands", "run_keys"]

_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S


def add_keys_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Add the subcommands of `ckptctl keys`."""
    commands = parser.add_subparsers(required=True, metavar="ACTION")

    def add(name: str, text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text, parents=[common])
        sub.add_argument("--keys-dir", help="folder of the keys (default: as configured)")
        sub.set_defaults(action=name)
        return sub

    add("new", "create this node's key pair and print the public key")
    trusting = add("trust", "trust a node: it may connect to this one, and this one to it")
    trusting.add_argument("node", help="its node id")
    trusting.add_argument("key", help="its public key, or the file node.key that contains it")
    trusting.add_argument("--valid-days", type=float, help="days until the key expires (default: never)")
    trusting.add_argument(
        "--keep-previous-hours",
        type=float,
        default=0.0,
        help="hours for which the node's previous key stays valid, during its rotation (default: 0)",
    )
    untrusting = add("untrust", "end the connections of a node and refuse new ones")
    untrusting.add_argument("node", help="its node id")
    add("rotate", "replace this node's key pair; its daemon uses the new one after a restart")
    add("new-signer", "create the key that signs this node's checkpoints, and print the public key")
    believing = add("trust-signer", "accept checkpoints that a node signed")
    believing.add_argument("node", help="its name")
    believing.add_argument("key", help="its public key: 64 hexadecimal digits")
    add("list", "print this node's public key and the nodes that it trusts")


def run_keys(args: argparse.Namespace) -> tuple[Any, str]:
    """Perform a subcommand; returns the answer for ``--json``, and its text.

    Raises:
        KeysError, SigningError: a key exists already, is missing or is malformed, or the node is not trusted.
    """
    folder = Path(args.keys_dir or load_config({}).config.keys_dir)
    if args.action in ("new", "rotate"):
        make = Keys.create if args.action == "new" else Keys.rotate
        public = make(folder).public
        return {"keys_dir": str(folder), "public_key": public}, public
    if args.action == "trust":
        return _trust(folder, args)
    if args.action == "new-signer":
        public = create_signer(folder)
        return {"keys_dir": str(folder), "signer": public}, public
    if args.action == "trust-signer":
        trust_signer(folder, args.node, args.key)
        text = f"checkpoints that {args.node} signed are accepted"
        return {"keys_dir": str(folder), "node": args.node, "signer": args.key}, text
    if args.action == "untrust":
        untrust(folder, args.node)
        return {"keys_dir": str(folder), "node": args.node}, f"{args.node} is no longer trusted"
    return _list(folder)


def _trust(folder: Path, args: argparse.Namespace) -> tuple[Any, str]:
    key = _key_of(args.key)
    trust(
        folder,
        args.node,
        key,
        valid_for_s=None if args.valid_days is None else args.valid_days * _DAY_S,
        keep_previous_s=args.keep_previous_hours * _HOUR_S,
    )
    text = f"{args.node} is trusted, with key {key}"
    return {"keys_dir": str(folder), "node": args.node, "public_key": key}, text


def _list(folder: Path) -> tuple[Any, str]:
    public, now_s = Keys.load(folder).public, time.time()
    keys = trusted_keys(folder)
    lines = [f"this node: {public}", *(_shown(key, now_s) for key in keys)]
    answer = {
        "keys_dir": str(folder),
        "public_key": public,
        "trusted": trusted(folder),
        "keys": [
            {
                "node": key.node,
                "public_key": key.public,
                "expires_s": None if key.expires_s == float("inf") else key.expires_s,
                "previous": key.previous,
            }
            for key in keys
        ],
    }
    return answer, "\n".join(lines)


def _shown(key: TrustedKey, now_s: float) -> str:
    text = f"{key.node}: {key.public}" + (" (previous)" if key.previous else "")
    if not key.valid_at(now_s):
        return f"{text}, EXPIRED {format_age(now_s - key.expires_s)} ago"
    if key.expires_s != float("inf"):
        return f"{text}, expires in {format_age(key.expires_s - now_s)}"
    return text


def _key_of(text: str) -> str:
    """A key given as text, or the one in a certificate file."""
    path = Path(text)
    if not path.is_file():  # a key may contain characters of a path
        return checked_key(text)
    for line in _read(path).splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and name.strip() == "public-key":
            return checked_key(value.strip().strip('"'))
    raise KeysError(f"{path} contains no public key")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"cannot read {path}: {error}") from error
