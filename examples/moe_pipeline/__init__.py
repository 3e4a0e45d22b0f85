"""The example model as a pipeline of stages, each replicated: `make demo-pipeline`."""
