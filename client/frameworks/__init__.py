"""Integrations with the training loops of other libraries. Each module imports only its own library.

``huggingface.CkptdCallback`` for transformers' ``Trainer``, ``lightning.CkptdCallback`` for
Lightning's, ``accelerate.checkpointer`` for loops with Accelerate.
"""

__all__: list[str] = []
