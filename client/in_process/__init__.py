"""A restart within the process: another rank has failed, and this one meets the others again."""
