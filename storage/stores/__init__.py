"""Stores: the interface, and one module for each kind."""
