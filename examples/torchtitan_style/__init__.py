"""A training script in the manner of torchtitan, with ckptd in three lines: see ``train.py``."""
