"""The daemon as a process of this machine: stopping it, its log, and what a bug report needs."""
