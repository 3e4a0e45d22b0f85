"""Slots, rings and the bytes of a segment file."""
