"""Which operators are anchored at which iteration (pure)."""
