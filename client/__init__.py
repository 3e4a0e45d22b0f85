"""The in-process SDK: ``from ckptd.client import Checkpointer``."""

from ckptd.client.certificate import Certificate
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.replay import ReplayMismatch
from ckptd.saved import SavedIteration, saved_iterations

__all__ = ["Certificate", "Checkpointer", "ReplayMismatch", "SavedIteration", "saved_iterations"]
