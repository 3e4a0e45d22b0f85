"""The data of a training loop: its position, its restoration to the same batches, and their check."""

from ckptd.client.data.batches import Batches
from ckptd.client.data.ledger import BatchLedger

__all__ = ["BatchLedger", "Batches"]
