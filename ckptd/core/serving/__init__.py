"""A tensor-parallel server of any number of devices: who has which heads, and what a loss costs (pure)."""
