"""Benchmarks: each compares variants within one run, and its claims are ratios."""
