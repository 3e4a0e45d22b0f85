"""Imported once by the fork server, so that every process begins with what all of them would import.

Looked at with ``sys.modules`` before and after a job: what is imported late (torch._dynamo by an
optimizer's first step, most of a second) counts, too.
"""

import pytest
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor
import torch.nn.utils.clip_grad
import torch.utils.checkpoint

import ckptd.client
import ckptd.client.elastic.job  # with scipy, most of a second of each elastic rank

__all__ = ["ckptd", "pytest", "torch"]
