"""`ckptctl top` and `dash`: whether every rank is protected, in a terminal and as a page."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path

from ckptd.ctl.command import CommandError, CommandOutcome, Commands, connected, show
from ckptd.dash.dash_poll import DaemonPoll
from ckptd.dash.dash_server import DashServer, is_loopback, read_token
from ckptd.dash.top_screen import screen_text, watch

_VIEW_S = 1.0


def add_view_commands(commands: Commands) -> None:
    """Add `top` and `dash`."""
    text = "show whether every rank is protected; on a terminal once a second, else once"
    _add_whole_job(commands.add("top", _top, text, timeout_s=3.0))
    text = "serve a page that shows whether every rank is protected, until it is interrupted"
    dash = commands.add("dash", _dash, text, timeout_s=3.0)
    _add_whole_job(dash)
    text = "IP address to listen on; others than loopback need a token (default %(default)s)"
    dash.add_argument("--address", default="127.0.0.1", type=_ip_address, help=text)
    dash.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    text = "file with the token that viewers must have (default: a random one, where one is needed)"
    dash.add_argument("--token-file", type=Path, metavar="FILE", help=text)


def _add_whole_job(parser: argparse.ArgumentParser) -> None:
    text = "every 10 s ask all nodes of the runs, to show ranks of other nodes, too"
    parser.add_argument("--whole-job", action="store_true", help=text)


def _ip_address(text: str) -> str:
    is_loopback(text)  # raises for one that is none
    return text


# -- the commands ---------------------------------------------------------------------------------


def _top(args: argparse.Namespace) -> CommandOutcome:
    with connected(args) as client:
        poll = DaemonPoll(client, whole_job=args.whole_job)
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not args.json
        view = watch(poll.view) if on_terminal else poll.view()
    return CommandOutcome(view, screen_text(view))


def _dash(args: argparse.Namespace) -> CommandOutcome:
    """Returns only through an exception."""
    with connected(args) as client:
        poll = DaemonPoll(client, whole_job=args.whole_job)
        view = poll.view()
        try:
            server = DashServer(args.address, args.port, _token(args))
        except OSError as error:
            raise CommandError(f"{args.address} port {args.port} cannot be used: {error}") from error
        with server:
            server.publish(view)  # before anybody can know the address
            show(args, CommandOutcome({"url": server.url}, f"the page is at {server.url}"))
            sys.stdout.flush()
            while True:
                time.sleep(_VIEW_S)
                server.publish(poll.view())


def _token(args: argparse.Namespace) -> str:
    """What viewers must have; "" on loopback unless a file is given."""
    if args.token_file is None:
        return "" if is_loopback(args.address) else secrets.token_urlsafe(24)
    try:
        return read_token(args.token_file)
    except (OSError, ValueError) as error:
        raise CommandError(f"the token cannot be read: {error}") from error
