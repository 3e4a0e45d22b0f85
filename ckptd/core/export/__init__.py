"""Which tensors a snapshot makes, under which names."""
