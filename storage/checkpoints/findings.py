"""The findings of a verification, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ckptd.storage.checkpoints.names import CheckpointId

__all__ = ["Finding", "Progress", "Severity", "VerifyReport", "is_whole"]


class Severity(StrEnum):
    """The severity of a finding: data are lost, an operator should look, or information."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A finding about a key, and about one ``tensor`` of it if that is not empty."""

    severity: Severity
    key: str
    what: str
    tensor: str = ""

    def __str__(self) -> str:
        """The finding in one line."""
        tensor = f" (tensor {self.tensor!r})" if self.tensor else ""
        return f"{self.severity}: {self.key}: {self.what}{tensor}"


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a verification: the key being read, and the amount read so far."""

    key: str
    num_objects: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The findings, errors first, and the checkpoints that are whole: (job, run, id)."""

    findings: tuple[Finding, ...]
    whole: tuple[tuple[str, str, CheckpointId], ...]
    num_objects: int
    read_bytes: int

    @property
    def ok(self) -> bool:
        """Whether no data are lost."""
        return is_whole(self.findings)


def is_whole(findings: Iterable[Finding]) -> bool:
    """Whether none of the findings is an error."""
    return all(finding.severity is not Severity.ERROR for finding in findings)
