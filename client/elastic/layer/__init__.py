"""The mixture layer: experts with any number of replicas on any ranks."""
