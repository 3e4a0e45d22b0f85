"""`ckptctl keys`: this node's key pair, and whom it trusts. Works on the folder; no daemon is asked.

A running daemon looks at the folder again when somebody unknown connects, and once a second at the
keys of those that are connected: neither trusting a node nor the opposite needs a restart. A new
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
    """The subcommands."""
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
    trusting.add_argument("--valid-days", type=float, help="the key expires after so many days")
    trusting.add_argument(
        "--keep-previous-hours",
        type=float,
        default=0.0,
        help="accept the key that the node had for so long, too: for its rotation (default: 0)",
    )
    untrusting = add("untrust", "end all connections of a node, and let it connect no more")
    untrusting.add_argument("node", help="its node id")
    add("rotate", "replace this node's key pair; its daemon uses the new one after a restart")
    add("new-signer", "make the key that signs this node's checkpoints and print its public half")
    believing = add("trust-signer", "believe checkpoints that a node signed")
    believing.add_argument("node", help="its name")
    believing.add_argument("key", help="its public key: 64 hexadecimal digits")
    add("list", "this node's public key and the nodes it trusts")


def run_keys(args: argparse.Namespace) -> tuple[Any, str]:
    """Perform a subcommand; returns what it found, for ``--json`` and as text.

    Raises:
        KeysError, SigningError: there is a key already, none at all, something is no key, or a node is not trusted.
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
        text = f"checkpoints that {args.node} signed are believed"
        return {"keys_dir": str(folder), "node": args.node, "signer": args.key}, text
    if args.action == "untrust":
        untrust(folder, args.node)
        return {"keys_dir": str(folder), "node": args.node}, f"{args.node} is not trusted any more"
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
    told = {
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
    return told, "\n".join(lines)


def _shown(key: TrustedKey, now_s: float) -> str:
    text = f"{key.node}: {key.public}" + (" (previous)" if key.previous else "")
    if not key.valid_at(now_s):
        return f"{text}, EXPIRED {format_age(now_s - key.expires_s)} ago"
    if key.expires_s != float("inf"):
        return f"{text}, expires in {format_age(key.expires_s - now_s)}"
    return text


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
