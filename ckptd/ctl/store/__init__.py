"""`ckptctl checkpoints`, `verify` and what they do in a store."""
