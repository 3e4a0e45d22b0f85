"""Training on nodes that come and go as in a recorded trace, simulated: `bench.traces` prints it."""
