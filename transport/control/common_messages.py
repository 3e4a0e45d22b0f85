"""What anybody says to a daemon and hears from it: who one is, yes and no, and what is held of a run."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ckptd.transport.control.message_parts import (
    Epoch,
    Holdings,
    Iteration,
    Member,
    Name,
    NodeCard,
    ShortText,
)

__all__ = [
    "Done",
    "GetHoldings",
    "Hello",
    "Ping",
    "Pong",
    "Refused",
    "RunSeen",
    "SeeRun",
    "Welcome",
]


class Hello(Struct, frozen=True, tag=True):
    """First words of a connection: software version, process id, and what one is.

    The daemon asks the kernel for the process behind the connection; one that it cannot see (of a
    container, say) is watched by its owner lock. Where libzmq does not tell, `pid` counts, if
    `pid_namespace`, the target of the link /proc/self/ns/pid, is the daemon's.
    """

    version: ShortText
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    role: ShortText = "trainer"
    pid_namespace: ShortText = ""


class Ping(Struct, frozen=True, tag=True):
    """Are you there, and do you still know me?"""


class GetHoldings(Struct, frozen=True, tag=True):
    """What does this node hold of a run, its own ranks' and others'? (Between daemons.)

    ``left_out``: iteration and epoch of quarantined snapshots. Storage offers no checkpoint with
    one of them, but older ones instead.
    ``nodes``: those of a start that is under way. If the one who asks is a member, they may act on
    the run, too.
    """

    job: Name
    run: Name
    left_out: Annotated[tuple[tuple[Iteration, Epoch], ...], Meta(max_length=1 << 16)] = ()
    nodes: Annotated[tuple[Name, ...], Meta(max_length=1 << 16)] = ()


class SeeRun(Struct, frozen=True, tag=True):
    """What is held of a run, here and on the nodes that took part in it before and are not among ``known``?

    ``storage``: also what is durable, if this node has a store. It holds as the node ".store" and,
    if it does not answer, is silent under that name.
    """

    job: Name
    run: Name
    known: Annotated[tuple[Name, ...], Meta(max_length=1 << 20)] = ()
    storage: bool = False


class Welcome(Struct, frozen=True, tag=True):
    """Who answers. `boot_id` is new at every start of the daemon.

    `started_by_trainer`: it makes way for a daemon that is started by `ckptd run`. `settings` are
    those which a trainer may expect to be as its own environment has them, as text, without
    credentials.
    """

    version: str
    node_id: str
    pid: int
    segment_dir: str
    boot_id: str = ""
    card: NodeCard | None = None
    started_by_trainer: bool = False
    settings: dict[str, str] = {}


class RunSeen(Struct, frozen=True, tag=True):
    """The holdings of this node and of others that answered in time, with how to reach these others."""

    holdings: tuple[Holdings, ...]
    cards: tuple[NodeCard, ...]
    members: tuple[Member, ...] = ()  # of the run, as far as this daemon was told
    silent: tuple[Name, ...] = ()  # were asked and did not answer in time


class Done(Struct, frozen=True, tag=True):
    """It is done; `message` says what was done where that is not obvious."""

    message: str = ""


class Pong(Struct, frozen=True, tag=True):
    """I am here. `attached` is false when this connection has no session (attach again).

    `park` is the number of a request to park that this trainer has not answered; 0: there is none.
    """

    boot_id: str
    attached: bool
    park: int = 0


class Refused(Struct, frozen=True, tag=True):
    """No, and why, and what to do about it."""

    code: str
    message: str
    hint: str = ""
