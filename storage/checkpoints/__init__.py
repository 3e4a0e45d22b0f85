"""Checkpoints in a store: names, manifests, what may be deleted, whether it is whole."""
