"""Who may ask the daemon for what, where the users of a node are kept apart (docs/threat_model.md).

Every message of a trainer or of `ckptctl` is checked here before it is served, by the user that the kernel
names for its connection, and every answer about more than one run is cut to what this user may see. Root and
the daemon's own user are operators: they may do everything. Any other user may act on its own jobs, which are
those with its number in their names (`ckptd.core.users`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from ckptd.core.sessions import TrainerSession
from ckptd.core.users import job_prefix, owner_of
from ckptd.transport import messages as m
from ckptd.transport.access.local_trust import own_users, user_name
from ckptd.transport.messages import RefusalCode


class Rule(StrEnum):
    """What a message needs."""

    ANYBODY = "anybody"
    """It is about no run."""
    SESSION = "session"
    """It is about the run of its session, to which only the user that attached may speak."""
    OWNER = "owner"
    """It names a job, of which the user is the owner."""
    NARROWED = "narrowed"
    """Its answer is about all runs, and is cut to those of the user."""
    OPERATOR = "operator"
    """It is about the daemon."""


RULES: dict[type, Rule] = {
    **dict.fromkeys((m.Hello, m.Ping), Rule.ANYBODY),
    **dict.fromkeys(
        (
            m.Reserve,
            m.ReserveBeside,
            m.Drop,
            m.Detach,
            m.Join,
            m.Fetch,
            m.GetFetch,
            m.TellReplay,
            m.Filled,
            m.Report,
            m.Notice,
            m.ParkOutcome,
            m.TellElastic,
        ),
        Rule.SESSION,
    ),
    **dict.fromkeys(
        (
            m.Attach,
            m.SeeRun,
            m.Drill,
            m.GetDurableWorlds,
            m.BringStored,
            m.Park,
            m.AdmitNodes,
            m.Forget,
            m.Unquarantine,
            m.TellAudit,
        ),
        Rule.OWNER,
    ),
    **dict.fromkeys((m.GetStatus, m.GetPeers, m.GetSnapshots, m.GetEvents, m.GetElastic), Rule.NARROWED),
    m.StepAside: Rule.OPERATOR,
}


class UserAccess:
    """The rules for one daemon.

    Args:
        apart: whether users are kept apart; if not, everybody who may connect is an operator.
    """

    def __init__(self, *, apart: bool) -> None:
        self._apart, self._operators = apart, own_users()

    def is_operator(self, user: int | None) -> bool:
        """Whether this user may do everything. None: a caller within the daemon."""
        return not self._apart or user is None or user in self._operators

    def refusal(
        self, user: int | None, message: m.Message, session: TrainerSession | None
    ) -> m.Refused | None:
        """Why a message of this user is not served; None if it is.

        Args:
            session: of the connection.
        """
        if user is None or self.is_operator(user):
            return None
        if session is not None and session.user != user:
            text = f"this connection is the trainer of {session.key}, of another user"
            return m.Refused(RefusalCode.FOREIGN, text, "connect anew")
        rule = RULES.get(type(message))
        if rule is Rule.OWNER:
            return self._not_owned(user, message)
        # A reply has no rule; it is refused because nobody serves it.
        if rule is Rule.OPERATOR or (rule is None and isinstance(message, m.Request | m.OneWay)):
            what = f"{type(message).__name__} is for the operator of this daemon"
            return m.Refused(
                RefusalCode.FOREIGN,
                f"{what}, not for user {user_name(user)}",
                f"run it as root or as {user_name(os.geteuid())}",
            )
        return None

    def _not_owned(self, user: int, message: Any) -> m.Refused | None:
        if owner_of(message.job) == user:
            return None
        mine = job_prefix(user)
        name = f"name the job {mine + _own_part(message.job)!r}" if message.job else "name one of these jobs"
        return m.Refused(
            RefusalCode.FOREIGN,
            f"{type(message).__name__} of {message.job or 'all jobs'} by user {user_name(user)}: this daemon "
            f"keeps users apart (isolate_users), and the names of this user's jobs begin with {mine!r}",
            f"{name}, with job= in RunOptions or as an argument of ckptctl",
        )

    def sees(self, user: int | None) -> Callable[[str], bool]:
        """Whether this user may see a job."""
        if self.is_operator(user):
            return lambda _: True
        return lambda job: owner_of(job) == user

    def narrowed(self, user: int | None, message: m.Message, reply: m.Reply) -> m.Reply:
        """The part of the answer to this message that the user may see.

        Raises:
            TypeError: the answer is about all runs, and nothing here cuts it.
        """
        if self.is_operator(user) or RULES.get(type(message)) is not Rule.NARROWED:
            return reply
        sees = self.sees(user)

        def own(rows: Any) -> Any:
            return tuple(row for row in rows if sees(row.job))

        changes: dict[str, Any] = {}
        match reply:
            case m.Status():
                changes = {"sessions": own(reply.sessions), "segments": own(reply.segments)}
                changes["audits"] = own(reply.audits)
                changes["users"] = tuple(one for one in reply.users if one.user == user)
                if reply.durable is not None:
                    ranks = own(reply.durable.ranks)
                    changes["durable"] = msgspec.structs.replace(reply.durable, ranks=ranks)
            case m.Peers():
                changes = {"ranks": own(reply.ranks), "replicas": own(reply.replicas)}
                changes["compared"] = own(reply.compared)
            case m.Snapshots():
                changes = {"ranks": own(reply.ranks), "replays": own(reply.replays)}
            case m.Events():
                changes = {"events": own(reply.events)}
            case m.SeenElastic():
                changes = {"told": own(reply.told)}
            case m.Refused():
                return reply
            case _:
                raise TypeError(f"{type(reply).__name__} cannot be cut to what a user may see")
        return msgspec.structs.replace(reply, **changes)


def _own_part(job: str) -> str:
    """A job's name without the number of a user."""
    owner = owner_of(job)
    return job if owner is None else job.removeprefix(job_prefix(owner))
