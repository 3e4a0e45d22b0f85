"""Imported once by the fork server, so that every job starts with torch and the client loaded."""

import torch.distributed
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.utils.clip_grad
import torch.utils.checkpoint

import ckptd.client

__all__ = ["ckptd", "torch"]
