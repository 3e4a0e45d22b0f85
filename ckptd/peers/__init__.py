"""This node among others: connections, members of runs, and replicas that are sent, hosted and read."""
