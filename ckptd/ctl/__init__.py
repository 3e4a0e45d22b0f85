"""`ckptctl`."""
