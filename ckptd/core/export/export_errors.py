"""What can go wrong in an export or an import."""

from __future__ import annotations

__all__ = ["DamagedSnapshot", "ExportError"]


class ExportError(RuntimeError):
    """It cannot be written; says why and what to do."""


class DamagedSnapshot(ExportError):
    """What is to be exported is there and is not what was sealed (or imported)."""
