"""Models and checkpoints of other formats."""
