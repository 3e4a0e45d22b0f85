"""Which operators are captured in which step: planning, slots for it, and changes that all ranks
make together.
"""
