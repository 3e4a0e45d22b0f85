"""Noticing that a job hangs, and saying who."""
