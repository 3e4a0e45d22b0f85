"""Replicas of other nodes' snapshots on this one: memory, grants, and who may touch what."""
