"""A tensor-parallel server of a mixture of experts, whose devices are killed while clients wait for tokens."""
