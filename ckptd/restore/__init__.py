"""Bringing snapshots of a rank here from whoever holds them (docs/replication.md §7)."""
