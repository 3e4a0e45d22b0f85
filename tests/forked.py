"""Processes that begin with torch and the client imported: forked from one server, which each
process of tests starts once.

A fresh interpreter spends seconds of a core on importing torch; a fork begins in milliseconds. What
they inherit is the environment that the server had when it was started, hence what a process needs
of it is told to the process.
"""

from __future__ import annotations

import multiprocessing

__all__ = ["FORKED"]

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.e2e.job", "tests.e2e.elastic_job", "tests.preload"])
