"""The groups of options: each refuses what cannot be used when it is made, and a keyword of earlier
releases is answered with how it is written now.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.client import (
    Checkpointer,
    DaemonOptions,
    LayoutOptions,
    PartialOptions,
    RecoveryOptions,
    RunOptions,
    SnapshotOptions,
)
from ckptd.client import options as module
from ckptd.client.options import CheckpointerOptions, PlacementOptions
from ckptd.client.training_state import examine
from tests.option_groups import grouped

KINDS = (
    RunOptions,
    DaemonOptions,
    SnapshotOptions,
    RecoveryOptions,
    LayoutOptions,
    PlacementOptions,
)
# Every keyword that `Checkpointer` had before there were groups, with a value that says nothing new.
BEFORE: dict[str, Any] = {
    "job": "j",
    "rank": 0,
    "world_size": 1,
    "topology": "",
    "policy": "sliding",
    "window": 4,
    "every": 1,
    "ordering": "hard",
    "capacities": None,
    "operators": None,
    "masters": None,
    "freeze": "auto",
    "on_mismatch": "raise",
    "options": "recorded",
    "verify_iterations": 1,
    "max_overhead": 0.01,
    "inline_copy": None,
    "nan_check_every": 16,
    "replicas": 1,
    "replicated": None,
    "capture_once": True,
    "start_from": None,
    "park": None,
    "park_after_s": 9.0,
    "required": True,
    "resume_at": 3,
    "timeout_s": 30.0,
}


def made(**keywords: Any) -> Checkpointer:
    model = nn.Linear(2, 2)
    return Checkpointer(model, torch.optim.SGD(model.parameters()), **{"daemon": None, **keywords})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"rank": "0"}, "rank='0': pass a whole number, or None"),
        ({"rank": -1}, "rank=-1 is not in"),
        ({"world_size": 0}, "world_size=0: pass a number from 1 on"),
        ({"topology": 4}, "topology=4: pass a text"),
        ({"daemon": "/tmp/socket"}, "daemon='/tmp/socket': use 'auto', None, or an endpoint"),
        ({"timeout_s": 0}, "timeout_s=0: pass seconds above 0"),
        ({"timeout_s": "5"}, "timeout_s='5': pass seconds above 0"),
        ({"replicas": -1}, "replicas=-1: pass a number of nodes, or None"),
        ({"window": True}, "window=True: a window has 1 to 64 snapshots"),
        ({"window": "4"}, "window='4': a window has"),
        ({"every": "2", "policy": "dense"}, "every='2': pass a number of iterations, or with policy='dense'"),
        ({"every": "checkfrq"}, "one of 'checkfreq', 'gemini', 'young-daly'"),
        ({"every": 2}, "only policy='dense', 'partial' and 'selected'"),
        ({"every": "gemini"}, "every=gemini: only dense snapshots have an interval by a rule"),
        ({"every": "gemini", "policy": "partial"}, "every=gemini: only dense snapshots"),
        ({"every": "checkfreq", "policy": "dense", "max_stall": 1}, "max_stall=1: pass a share of the time"),
        ({"every": "young-daly", "policy": "dense"}, "mtbf_s=None: every='young-daly' needs the seconds"),
        ({"every": "young-daly", "policy": "dense", "mtbf_s": 0}, "mtbf_s=0: every='young-daly' needs"),
        ({"policy": "some"}, "policy='some': choose 'sliding', 'aligned', 'dense', 'partial' or 'selected'"),
        ({"partial": 3, "policy": "partial"}, r"partial=3: pass PartialOptions"),
        (
            {"partial": PartialOptions()},
            "partial= is for policy='partial' and 'selected', and the policy is 'sliding'",
        ),
        (
            {"partial": PartialOptions(persist_experts=2), "policy": "selected"},
            "persist_experts=2: it is for policy='partial', where experts take turns",
        ),
        (
            {"partial": PartialOptions(persist_experts=2)},
            "partial= is for policy='partial' and 'selected', and the policy is 'sliding'",
        ),
        (
            {"partial": PartialOptions(experts=2), "window": 2, "policy": "partial"},
            "window=2 and experts=2: both say how many experts",
        ),
        ({"max_overhead": 0}, "max_overhead=0: pass the share of an iteration"),
        ({"inline_copy": "yes"}, "inline_copy='yes': pass True, False, or None"),
        ({"nan_check_every": -1}, "nan_check_every=-1: pass a number of snapshots"),
        ({"to_peers": "grads"}, "to_peers='grads': choose 'state' or 'gradients'"),
        ({"to_peers": "gradients"}, "to_peers='gradients' with policy='sliding'"),
        ({"to_peers": "gradients", "policy": "dense", "every": 2}, "to_peers='gradients' and every=2"),
        (
            {"to_peers": "gradients", "policy": "dense", "every": "gemini"},
            "and every='gemini': the gradients",
        ),
        ({"every": 0, "policy": "dense"}, "every=0: pass a number of iterations, 1 or more"),
        ({"every": 4}, "every=4 with policy='sliding': only policy='dense'"),
        ({"required": "no"}, "required='no': pass True or False"),
        ({"start_from": 3}, "start_from=3: pass a file, a folder or a URL"),
        ({"resume_at": -1}, "resume_at=-1: pass the number of an iteration, or None"),
        ({"resume_at": True}, "resume_at=True"),
        ({"verify_iterations": -1}, "verify_iterations=-1: pass how many iterations"),
        ({"freeze": "melt"}, "freeze='melt': choose 'auto', 'drop' or 'inputs'"),
        ({"param_groups": "mine"}, "param_groups='mine': choose 'recorded' or 'script'"),
        ({"park": "yes"}, "park='yes': pass True, False, or None"),
        ({"park_after_s": 0}, "park_after_s=0: pass seconds above 0, or None"),
        ({"in_process": "connect"}, "in_process='connect': pass a function that makes the process groups"),
        (
            {"in_process": print, "park": True},
            "in_process= and park=True: a rank that restarts in its process",
        ),
        ({"masters": [torch.zeros(1)]}, "masters= is a list; pass a dict"),
        ({"replicated": "*"}, "replicated= is a str; pass a dict"),
        ({"operators": ["a*"]}, "operators= is a list; pass a dict"),
        ({"capture_once": None}, "capture_once=None: pass True or False"),
        ({"attributes": "all"}, "attributes='all': pass True or False"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_group_refuses_what_cannot_be_used(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped(**keywords)


@pytest.mark.parametrize("name", BEFORE)
def test_every_keyword_of_earlier_releases_says_where_it_is_now(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^Checkpointer\(\): {name}= is now ") as refused:
        made(**{name: BEFORE[name]})
    written = str(refused.value).partition(" is now ")[2].partition(" (see ")[0]
    assert made(**_evaluated(written)).off, "what the message says can be written"


def _evaluated(call: str) -> dict[str, Any]:
    names = {kind.__name__: kind for kind in KINDS}
    found: dict[str, Any] = eval(f"dict({call})", {"dict": dict, **names})
    found.pop("daemon", None)  # off all the same: there is none here
    return found


def test_several_old_keywords_are_answered_together() -> None:
    """Who moves a script sees all of it at once, with the values."""
    with pytest.raises(TypeError) as refused:
        made(run="r", job="j", policy="dense", every=3, masters={"weight": torch.zeros(2)})
    assert str(refused.value) == (
        "Checkpointer(): job= is now run=RunOptions(name='r', job='j'); policy= and every= are now "
        "snapshots=SnapshotOptions(policy='dense', every=3); masters= is now layout=LayoutOptions(masters=...) (see docs/integration.md)"
    )


def test_an_unknown_keyword_is_refused_as_python_does() -> None:
    with pytest.raises(TypeError, match=r"Checkpointer\(\) got an unexpected keyword argument 'w'"):
        made(w=3)


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("windw", r"'windw'; did you mean snapshots=SnapshotOptions\(window=\.\.\.\)\?$"),
        ("store", r"'store': checkpoints in storage are made by the daemon: start it with CKPTD_STORE="),
        ("scheduler", r"'scheduler': pass it in state="),
    ],
)
def test_an_unknown_keyword_leads_to_what_may_be_meant(keyword: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        made(**{keyword: 3})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"snapshots": {"window": 4}},
            r"snapshots= is a dict; pass SnapshotOptions\(window=4\)",
        ),
        ({"snapshots": RecoveryOptions()}, "snapshots= is a RecoveryOptions; pass SnapshotOptions"),
        ({"recovery": None}, "recovery= is a NoneType; pass RecoveryOptions"),
        ({"run": 3}, r"run= is a int; pass a name, or RunOptions\(\)"),
        ({"daemon": False}, "daemon= is a bool; pass 'auto', an endpoint, None, or DaemonOptions"),
    ],
    ids=["dict", "other group", "None", "run", "daemon"],
)
def test_a_group_of_another_type_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        made(**keywords)


def test_groups_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SnapshotOptions().window = 3  # type: ignore[misc]


def test_a_name_and_an_endpoint_stand_for_their_groups() -> None:
    found = CheckpointerOptions.of({"run": "r", "daemon": "ipc:///run/x.sock"})
    assert found.run == RunOptions(name="r")
    assert found.daemon == DaemonOptions(endpoint="ipc:///run/x.sock")
    assert CheckpointerOptions.of(found.keywords()) == found


def test_an_endpoint_of_none_in_the_group_is_off_too() -> None:
    assert made(daemon=DaemonOptions(endpoint=None)).off


def test_every_field_is_documented_where_it_is_defined() -> None:
    """A string under each field, since a docstring far away is not kept up."""
    tree = ast.parse(inspect.getsource(module))
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    for kind in KINDS:
        body = classes[kind.__name__].body
        documented = {
            field.target.id
            for field, text in pairwise(body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        }
        assert documented == {field.name for field in dataclasses.fields(kind)}, kind


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": 0}, "experts=0: pass a number of experts from 1 on"),
        ({"num_experts": "8"}, "num_experts='8': pass a number of experts"),
        ({"experts": 9, "num_experts": 8}, "experts=9: a layer has num_experts=8"),
        ({"persist_experts": 0}, "persist_experts=0: pass a number of experts from 1 on"),
        ({"persist_experts": 9, "num_experts": 8}, "persist_experts=9: a layer has num_experts=8"),
        ({"persist_experts": 1, "experts": 2}, "each has experts=2 of a layer; pass at least as many"),
        ({"persist_experts": 1, "selection": "layer"}, "pass selection='turns', or persist_experts=None"),
        ({"selection": "best"}, "selection='best': choose 'turns', 'layer' or 'model'"),
        ({"scope": "all"}, "scope='all': choose 'both', 'optimizer' or 'weights'"),
        ({"lost_tokens_limit": 1}, "lost_tokens_limit=1: pass a share of the tokens, such as 0.0375"),
    ],
)
def test_unusable_choices_of_experts_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PartialOptions(**fields)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "policy='partial' leaves experts out of snapshots, and no experts were found"),
        ({"park": True}, "park=True and policy='partial'"),
    ],
)
def test_partial_snapshots_need_experts_and_park_nothing(keywords: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        examine(
            model,
            torch.optim.SGD(model.parameters()),
            None,
            options=CheckpointerOptions.of(grouped(policy="partial", **keywords)),
        )
