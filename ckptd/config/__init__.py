"""Settings of the daemon: their names, defaults, values and files."""
