"""Host memory of a node: segment files and their slots, pages and locks."""
