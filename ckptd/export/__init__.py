"""A model out of one snapshot, and into a run: `ckptctl export` and `ckptctl import`.

A `TensorSource` gives the tensors of one snapshot, be it in memory or in storage; `plan` says what
they make; `files`, `safetensors_files` and `dcp` write it: complete and synced, or not at all.
"""
