"""Everything that is decided and touches nothing: no I/O, no clock, no threads, no randomness of its own."""
