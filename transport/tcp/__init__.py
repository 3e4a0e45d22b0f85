"""Transfers over TCP streams of our own, encrypted."""
