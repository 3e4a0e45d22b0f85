"""Export of a model from one snapshot, and import into a run: `ckptctl export` and `ckptctl import`.

A `TensorSource` (`memory_source`, `store_source`) returns the tensors of one snapshot.
`ckptd.core.export_plan` decides which tensors of the model they make, and under which names.
`exports` and `dcp` write these; `importing` reads models of other tools.
"""
