"""Snapshots that a peer computes from gradients: what is sent, and the process that computes."""
