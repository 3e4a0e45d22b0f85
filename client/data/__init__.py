"""The data of a loop: where in it a loop is, how a successor comes to the very same batches, and
whether it did.
"""

from ckptd.client.data.batches import Batches
from ckptd.client.data.ledger import BatchLedger

__all__ = ["BatchLedger", "Batches"]
