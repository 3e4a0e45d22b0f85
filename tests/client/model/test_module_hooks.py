"""Module hooks that do not travel with copies."""

from __future__ import annotations

import copy
import pickle
import threading

import torch
from torch import nn

from ckptd.client.model.module_hooks import ModuleHook


class Owner:
    """Like a checkpointer, it holds what can be neither copied nor pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0

    def called(self, module: nn.Module, args: object) -> None:
        self.calls += 1


def test_only_the_module_itself_calls() -> None:
    owner, module = Owner(), nn.Linear(2, 2)
    module.register_forward_pre_hook(ModuleHook(owner.called))
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    module(torch.ones(2))
    assert owner.calls == 1
    for twin in twins:
        assert torch.equal(twin(torch.ones(2)), module(torch.ones(2)))
    assert owner.calls == 3
