"""Every error of ckptd, as one tree.

::

    CkptdError                  operation, ids, hint
    ├── LocalProtocolError      our own bug: a transition or a call that may not happen
    ├── RemoteProtocolError     the peer sent what the protocol does not allow
    ├── AttachRefused           the daemon said no, with a code, a reason and what to do
    ├── ElasticError            no plan exists for these nodes and experts
    ├── TransientError          the same call may succeed later
    │   └── DaemonUnavailable   no daemon answers on this node
    └── CorruptionError         stop: what was stored is not what is there
        └── SegmentError        a segment file is not one of ours, or is damaged

``ckptd.transport`` and ``ckptd.storage`` import nothing of ours and therefore raise small errors of
their own (all of them ``ValueError`` or ``OSError``); who calls them raises one of these ``from`` it.
What users pass wrongly is a plain ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "AttachRefused",
    "CkptdError",
    "CorruptionError",
    "DaemonUnavailable",
    "ElasticError",
    "LocalProtocolError",
    "RemoteProtocolError",
    "SegmentError",
    "TransientError",
]

_COMMANDS = ("ckptctl", "ckptd", "pip", "torchrun")


def _with_hint(text: str, hint: str) -> str:
    """A hint is a sentence of its own; a name or a command at its beginning stays as it is."""
    if not hint:
        return text
    first = hint.partition(" ")[0].rstrip(",:;")
    return f"{text}. {hint[0].upper() + hint[1:] if first.isalpha() and first not in _COMMANDS else hint}"


class CkptdError(Exception):
    """What went wrong, during which operation, on what, and what the operator can do about it.

    Args:
        message: what is wrong, in one sentence without a full stop.
        operation: what was being done, such as ``"attach"``.
        ids: what it was done to, such as ``{"rank": 3, "slot": 1}``.
        hint: what to do about it.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        ids: Mapping[str, object] | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.operation = operation
        self.ids = dict(ids or {})
        self.hint = hint

    def __str__(self) -> str:
        """One line: ``operation [ids]: message. Hint``."""
        about = " ".join(f"{key}={value}" for key, value in self.ids.items())
        head = " ".join(part for part in (self.operation, f"[{about}]" if about else "") if part)
        return _with_hint(f"{head}: {self.message}" if head else self.message, self.hint)


class LocalProtocolError(CkptdError):
    """We broke our own protocol: a bug to report."""


class RemoteProtocolError(CkptdError):
    """The peer broke the protocol: another version, or not a ckptd at all."""


class AttachRefused(CkptdError):
    """The daemon refused this trainer; ``code`` is for programs, the rest for people."""

    def __init__(self, code: str, message: str = "", hint: str = "") -> None:
        super().__init__(message, operation="attach", hint=hint)
        self.code = code
        # An exception is pickled and copied by its args: they must rebuild it.
        self.args = (code, message, hint)

    def __str__(self) -> str:
        """One line: ``attach refused (code): message. Hint``."""
        return _with_hint(f"attach refused ({self.code}): {self.message}", self.hint)


class ElasticError(CkptdError):
    """No plan exists for these nodes and experts; says what is missing and what to do."""


class TransientError(CkptdError):
    """Worth trying again, within a bound."""


class DaemonUnavailable(TransientError):
    """No daemon answers on this node (yet)."""


class CorruptionError(CkptdError):
    """Stored bytes are not what was written: never retried, never trained on."""


class SegmentError(CorruptionError):
    """A segment file is not one of ours, is of another version, or is damaged."""
