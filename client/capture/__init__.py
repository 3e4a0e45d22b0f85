"""One snapshot after another: what is copied from where, into which slot."""
