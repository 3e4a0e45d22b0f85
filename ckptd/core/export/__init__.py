"""Export plans: the tensors that a snapshot contains, and their names."""
