"""Snapshots one after another: which tensors are copied, into which slot."""
