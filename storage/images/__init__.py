"""The image: what a slot holds and what is stored, and how stored images are read."""
