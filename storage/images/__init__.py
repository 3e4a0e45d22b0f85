"""Images: the contents of a slot and of stored objects, and reading of stored images."""
