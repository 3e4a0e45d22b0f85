"""Optimizer state of experts in shards of its own."""
