"""Checkpoints in a store: names, manifests, retention and verification."""
