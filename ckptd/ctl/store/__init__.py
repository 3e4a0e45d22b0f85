"""`ckptctl checkpoints` and `ckptctl verify`: commands on checkpoints in a store."""
