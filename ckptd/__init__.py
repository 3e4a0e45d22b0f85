"""Snapshots of every training iteration, kept in the memory of a daemon on each node."""

__version__ = "0.4.0"
