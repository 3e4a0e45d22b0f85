"""The shells between this node and others: who can be reached, replicas sent, hosted, lent and read."""
