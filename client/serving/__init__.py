"""A tensor-parallel server that keeps its requests when devices are lost (docs/serving.md)."""
