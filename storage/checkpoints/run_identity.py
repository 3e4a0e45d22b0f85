"""The identity of the run behind a job and run name: ``run.json``. ``docs/format.md`` section 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from ckptd.storage.checkpoints.names import check_name
from ckptd.storage.checkpoints.sealed_json import (
    MAX_TEXT,
    ManifestError,
    decode_sealed,
    in_range,
    seal_json,
)

__all__ = ["MAX_RUN_BYTES", "RUN_FORMAT", "RunIdentity", "check_run"]

RUN_FORMAT = "ckptd.run/1"
MAX_RUN_BYTES = 64 << 10
_MAX_TIME_NS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A run; ``run_id`` distinguishes runs that use the same names one after the other."""

    job: str
    run: str
    run_id: str
    created_at_ns: int
    tool: str

    def __post_init__(self) -> None:
        check_run(self.job, self.run, self.run_id, self.tool)
        in_range("created_at_ns", self.created_at_ns, 0, _MAX_TIME_NS)

    def to_bytes(self) -> bytes:
        """The stored form."""
        return seal_json(
            {
                "format": RUN_FORMAT,
                "job": self.job,
                "run": self.run,
                "run_id": self.run_id,
                "created_at_ns": self.created_at_ns,
                "tool": self.tool,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> RunIdentity:
        """Parse the output of `to_bytes`; raises ManifestError for anything else."""
        wire = decode_sealed(data, MAX_RUN_BYTES, _decoder)
        identity = cls(wire.job, wire.run, wire.run_id, wire.created_at_ns, wire.tool)
        if identity.to_bytes() != data:
            raise ManifestError("it is not in the form that this version writes")
        return identity


def check_run(job: str, run: str, run_id: str, tool: str) -> None:
    """Check that these values are valid in a manifest; raises ManifestError otherwise."""
    try:
        check_name(job, "job")
        check_name(run, "run")
        check_name(run_id, "run_id")
    except ValueError as error:
        raise ManifestError(str(error)) from error
    in_range("characters of the tool's name", len(tool), 0, MAX_TEXT)


class _WireRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Annotated[str, Meta(pattern=f"^{RUN_FORMAT}$")]
    job: str
    run: str
    run_id: str
    created_at_ns: int
    tool: str
    digest: str


_decoder = msgspec.json.Decoder(_WireRun)
