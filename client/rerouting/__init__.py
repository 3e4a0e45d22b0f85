"""A pipeline goes on without workers that died, and takes them back."""
