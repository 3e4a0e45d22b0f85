"""`ckptctl keys`: manage this node's key pair and its trusted nodes. Edits the folder; needs no daemon.

A running daemon reads the folder again when an unknown node connects, and checks the keys of
connected nodes once a second. Trusting a node, or ending that trust, needs no restart; a new key
pair of this node does.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ckptd.config.daemon_config import load_config
from ckptd.ctl.command import Command, CommandOutcome, Commands
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

_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S


def add_keys_commands(commands: Commands) -> None:
    """Add `keys` with its subcommands."""
    keys = commands.add("keys", None, "manage this node's keys and the peers that it trusts")
    actions = commands.of(keys, "ACTION")

    def add(name: str, function: Command, text: str) -> argparse.ArgumentParser:
        parser = actions.add(name, function, text)
        parser.add_argument("--keys-dir", help="folder of the keys (default: as configured)")
        return parser

    add("new", _new, "create this node's key pair and print the public key")
    trusting = add("trust", _trust, "trust a node: it may connect to this one, and this one to it")
    trusting.add_argument("node", help="its node id")
    trusting.add_argument("key", help="its public key, or the file node.key that contains it")
    trusting.add_argument("--valid-days", type=float, help="days until the key expires (default: never)")
    trusting.add_argument(
        "--keep-previous-hours",
        type=float,
        default=0.0,
        help="hours for which the node's previous key stays valid, during its rotation (default: 0)",
    )
    untrusting = add("untrust", _untrust, "end the connections of a node and refuse new ones")
    untrusting.add_argument("node", help="its node id")
    add("rotate", _rotate, "replace this node's key pair; its daemon uses the new one after a restart")
    add(
        "new-signer",
        _new_signer,
        "create the key that signs this node's checkpoints, and print the public key",
    )
    trusting = add("trust-signer", _trust_signer, "accept checkpoints that a node signed")
    trusting.add_argument("node", help="its name")
    trusting.add_argument("key", help="its public key: 64 hexadecimal digits")
    add("list", _list, "print this node's public key and the nodes that it trusts")


def _folder(args: argparse.Namespace) -> Path:
    return Path(args.keys_dir or load_config({}).config.keys_dir)


def _new(args: argparse.Namespace) -> CommandOutcome:
    folder = _folder(args)
    public = Keys.create(folder).public
    return CommandOutcome({"keys_dir": str(folder), "public_key": public}, public)


def _rotate(args: argparse.Namespace) -> CommandOutcome:
    folder = _folder(args)
    public = Keys.rotate(folder).public
    return CommandOutcome({"keys_dir": str(folder), "public_key": public}, public)


def _trust(args: argparse.Namespace) -> CommandOutcome:
    folder, key = _folder(args), _key_of(args.key)
    trust(
        folder,
        args.node,
        key,
        valid_for_s=None if args.valid_days is None else args.valid_days * _DAY_S,
        keep_previous_s=args.keep_previous_hours * _HOUR_S,
    )
    answer = {"keys_dir": str(folder), "node": args.node, "public_key": key}
    return CommandOutcome(answer, f"{args.node} is trusted, with key {key}")


def _untrust(args: argparse.Namespace) -> CommandOutcome:
    folder = _folder(args)
    untrust(folder, args.node)
    return CommandOutcome({"keys_dir": str(folder), "node": args.node}, f"{args.node} is no longer trusted")


def _new_signer(args: argparse.Namespace) -> CommandOutcome:
    folder = _folder(args)
    public = create_signer(folder)
    return CommandOutcome({"keys_dir": str(folder), "signer": public}, public)


def _trust_signer(args: argparse.Namespace) -> CommandOutcome:
    folder = _folder(args)
    trust_signer(folder, args.node, args.key)
    answer = {"keys_dir": str(folder), "node": args.node, "signer": args.key}
    return CommandOutcome(answer, f"checkpoints that {args.node} signed are accepted")


def _list(args: argparse.Namespace) -> CommandOutcome:
    folder = _folder(args)
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
    return CommandOutcome(answer, "\n".join(lines))


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
        try:
            return checked_key(text)
        except KeysError as error:
            hint = "`ckptctl keys list` on the other node prints its key"
            raise KeysError(f"{text!r} is neither a public key nor a file: {error}; {hint}") from error
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"cannot read {path}: {error}") from error
    for line in lines:
        name, equals, value = line.strip().partition("=")
        if equals and name.strip() == "public-key":
            return checked_key(value.strip().strip('"'))
    raise KeysError(f"{path} contains no public key")
