"""A restart within the process: another rank has failed, and this one goes back and meets the others again."""
