"""Training loops of other libraries, driven in one line. Each library is imported by its own module only.

``huggingface.CkptdCallback`` for transformers' ``Trainer``, ``lightning.CkptdCallback`` for
Lightning's, ``accelerate.checkpointer`` for loops with Accelerate.
"""

__all__: list[str] = []
