"""Elastic training of a small mixture of experts on hosts that vanish and come (`make demo-elastic`)."""
