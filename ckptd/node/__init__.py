"""The daemon of a node: its process, the sessions of trainers, and its answers."""
