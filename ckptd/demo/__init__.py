"""A byte-level Mixture-of-Experts transformer on real text, and a demo that kills its training (`kills`)."""
