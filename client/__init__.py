"""The in-process SDK: ``from ckptd.client import Checkpointer``."""

from ckptd.client.checkpointer import Checkpointer
from ckptd.client.recovery.replay import ReplayMismatch
from ckptd.client.recovery.self_verification import Certificate
from ckptd.saved import SavedIteration, saved_iterations

__all__ = ["Certificate", "Checkpointer", "ReplayMismatch", "SavedIteration", "saved_iterations"]
