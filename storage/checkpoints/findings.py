"""What a verification finds, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ckptd.storage.checkpoints.names import CheckpointId

__all__ = ["Finding", "Progress", "Severity", "VerifyReport", "is_whole"]


class Severity(StrEnum):
    """What a finding means: data are lost, somebody should look, or all is as it may be."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """Something about a key; ``tensor`` is the one that is concerned, if it is one."""

    severity: Severity
    key: str
    what: str
    tensor: str = ""

    def __str__(self) -> str:
        """In one line."""
        tensor = f" (tensor {self.tensor!r})" if self.tensor else ""
        return f"{self.severity}: {self.key}: {self.what}{tensor}"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is: what is being read, and how much was read up to now."""

    key: str
    num_objects: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found (errors first), and which checkpoints were found whole: (job, run, which)."""

    findings: tuple[Finding, ...]
    whole: tuple[tuple[str, str, CheckpointId], ...]
    num_objects: int
    read_bytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is lost."""
        return is_whole(self.findings)


def is_whole(findings: Iterable[Finding]) -> bool:
    """Whether none of the findings is an error."""
    return all(finding.severity is not Severity.ERROR for finding in findings)
