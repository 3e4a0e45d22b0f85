"""Replication, decided: what goes to which peer, what a host of replicas keeps, and a run's floor (pure)."""
