"""`ckptctl elastic`."""
