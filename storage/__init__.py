"""Storage: the image format, and stores, manifests and retention built on it.

Imports nothing else of ours: what goes in and out are buffers and names.
"""
