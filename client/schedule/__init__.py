"""The operators captured in each step: plans, slots for them, and changes that all ranks make together."""
