"""Targets of the trainer's side: values in images, and checkpoints of torch. They import torch."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ckptd.client import values
from ckptd.client.interchange.dcp_import import MetadataRefused, read_dcp_metadata
from tests.fuzz.mutations import in_msgpack
from tests.fuzz.target import Target, in_scratch, scratch

__all__ = ["TRAINER_TARGETS"]


def _value_seeds() -> list[bytes]:
    told = {
        "step": 3,
        "big": 1 << 80,
        "t": torch.arange(6).reshape(2, 3),
        "e": torch.zeros(0, 4),
        "a": np.arange(4.0),
        "s": {1, 2},
        "x": (np.float32(2), torch.bfloat16, torch.device("cpu"), torch.Size([2]), frozenset("a")),
    }
    return [values.pack(told), values.pack([{"a": (1, 2)}])]


def _metadata_seeds() -> list[bytes]:
    folder = scratch() / "dcp"
    state = {"w": torch.ones(4, 4), "optim": {"lr": 0.5, "m": torch.zeros(2)}}
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return [(folder / ".metadata").read_bytes()]


def _metadata(data: bytes) -> None:
    in_scratch("dcp/.metadata", data)
    read_dcp_metadata(scratch() / "dcp")


TRAINER_TARGETS = (
    Target("values", _value_seeds, values.unpack, (ValueError,), in_msgpack),
    Target("dcp_metadata", _metadata_seeds, _metadata, (MetadataRefused,)),
)
