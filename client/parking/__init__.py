"""The whole state of a step, put aside before a process ends."""
