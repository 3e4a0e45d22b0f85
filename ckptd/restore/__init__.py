"""Fetching a rank's snapshots from peers and storage (docs/replication.md §7)."""
