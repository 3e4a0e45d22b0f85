"""Errors of exports and imports."""

from __future__ import annotations

__all__ = ["DamagedSnapshot", "ExportError"]


class ExportError(RuntimeError):
    """The export or import cannot be done; the message gives the reason and the remedy."""


class DamagedSnapshot(ExportError):
    """The stored bytes differ from the sealed (or imported) ones."""
