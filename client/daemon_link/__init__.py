"""The connection of a trainer with its daemon, and the segments that it maps."""
