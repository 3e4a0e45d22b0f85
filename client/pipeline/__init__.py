"""Boundary logs of pipeline stages, and stages that replay by themselves."""
