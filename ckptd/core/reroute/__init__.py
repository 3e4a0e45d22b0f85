"""A pipeline goes on with a hole in it: the work of a lost worker runs in bubbles of the others (pure)."""
