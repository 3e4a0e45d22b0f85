"""Host memory of a node: slots, rings and segment files, their bytes, pages and locks."""
