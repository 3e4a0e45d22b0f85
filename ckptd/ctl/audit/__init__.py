"""`ckptctl audit`: a step is computed again from copies of two sealed snapshots, and compared bit for bit."""
