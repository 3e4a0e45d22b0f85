"""The daemon of a node: configuration, life, sessions of trainers, and what it answers."""
