"""The daemon as a process of this machine: stopping it, and its log."""
