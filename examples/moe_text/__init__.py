"""A byte-level Mixture-of-Experts transformer on real text, and the demo that kills its training."""
