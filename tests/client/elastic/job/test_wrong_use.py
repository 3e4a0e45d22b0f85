"""What ranks do wrong is told to all of them, in words; none is left waiting for the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.client.elastic.job.wrong_ranks import CASES, work
from tests.client.gloo_ranks import run_in_ranks

# What rank 0 is told, and rank 1; one where both are told the same.
EXPECTED = {
    "other_runs": ("ValueError: rank 1 was started with", "run='run-1'"),
    "other_experts": ("ValueError: rank 1 was started with",),
    "no_slot": ("DaemonUnavailable: recover: rank 1 on node", "ValueError: slots=0"),
    "half_a_slot": ("DaemonUnavailable: recover: rank 1 on node", "ValueError: slots=2.5"),
    "true_slots": ("DaemonUnavailable: recover: rank 1 on node", "ValueError: slots=True"),
    "text_threshold": ("ValueError: threshold='2'",),
    "text_straggler": (
        "DaemonUnavailable: recover: rank 1 on node",
        "ValueError: max_straggler='1.1'",
    ),
    "bad_name": ("DaemonUnavailable: recover: rank 1 on node", "ValueError: run='a/b'"),
    "too_few_slots": ("4 slots on 2 nodes cannot hold 9 experts",),
    "expert_fails": ("no weights for expert", "OSError: no weights for expert"),
    "without_layer": ("ValueError: the model has the mixture layers []",),
    "steps_too_soon": ("ValueError: call checkpointer() before steps()",),
    "other_totals": ("ValueError: the ranks were given other totals, [3, 4]",),
    "no_layers": ("DaemonUnavailable: recover: rank 1 on node", "ValueError: layers=None"),
    "other_times": ("ValueError: rank 1 was started with",),
    "no_total": ("ValueError: the ranks were given other totals, [3, None]",),
    "given_option": ("policy= is the ElasticJob's own", "ValueError: policy= is"),
    "no_state_dict": ("state['data']", "ValueError: state['data']"),
    "own_loads": ("ValueError: state['ckptd.loads']",),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("wrong")
    run_in_ranks(work, 2, folder, str(folder))
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", EXPECTED)
def test_all_ranks_hear_of_it(told: list[dict[str, str]], case: str) -> None:
    words = EXPECTED[case]
    assert words[0] in told[0][case], told[0][case]
    assert words[-1] in told[1][case], told[1][case]


def test_closing_twice_is_nothing(told: list[dict[str, str]]) -> None:
    assert [one["closed_twice"] for one in told] == ["", ""]
    assert EXPECTED.keys() | {"closed_twice"} == CASES.keys()
