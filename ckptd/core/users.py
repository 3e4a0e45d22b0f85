"""Users whose jobs a node keeps apart: whose job a name is, and how much memory each user may have. Pure.

The owner of a job is in its name: the jobs of user 1002 begin with ``u1002.``. So there is no record of
owners that could be lost, and nobody can take the name of another user's job first: a daemon that was
restarted, a node that holds a replica, and a store know the owner as well as the daemon that admitted the
trainer. A name without such a beginning is of no user: only root and the daemon's own user may use it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_UID = (1 << 32) - 2  # the number above is the kernel's "no user"
_PREFIX = re.compile(r"u(0|[1-9][0-9]{0,9})\.")


def job_prefix(user: int) -> str:
    """The beginning of the names of a user's jobs."""
    return f"u{user}."


def owner_of(job: str) -> int | None:
    """The user whose job this is; None: no user's.

    Example:
        ``owner_of("u1002.gpt") == 1002``, ``owner_of("gpt") is None``.
    """
    found = _PREFIX.match(job)
    return int(found[1]) if found is not None and int(found[1]) <= MAX_UID else None


def same_owner(job: str, other: str) -> bool:
    """Whether two jobs are of one user, or both of none."""
    return owner_of(job) == owner_of(other)


@dataclass(frozen=True, slots=True)
class UserQuotas:
    """The largest memory of each user's segments on this node, in bytes; 0: no limit of its own.

    Args:
        default_bytes: of users that are not in ``by_user``.
    """

    default_bytes: int = 0
    by_user: Mapping[int, int] = field(default_factory=dict)

    def of(self, user: int | None) -> int:
        """The quota of a user; a job without an owner has none."""
        return 0 if user is None else self.by_user.get(user, self.default_bytes)
