"""Where experts go, and when they move."""
