"""The in-process SDK: ``from ckptd.client import Checkpointer``."""

from ckptd.client.certificate import Certificate
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.replay import ReplayMismatch

__all__ = ["Certificate", "Checkpointer", "ReplayMismatch"]
