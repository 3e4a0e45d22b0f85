"""`ckptctl elastic`: what files and running jobs are answered, in numbers worked out by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ckptd.core.sessions import RankKey
from ckptd.ctl import elastic_command
from ckptd.ctl.command import CommandError
from ckptd.ctl.elastic_answers import (
    as_planned,
    lose,
    next_time,
    outlook,
    plan,
    read_file,
    situation,
)
from ckptd.ctl.elastic_command import (
    Canvas,
    lost_text,
    next_text,
    outlook_text,
    planned_text,
)
from ckptd.ctl.main import main
from ckptd.errors import ElasticError
from ckptd.node.admin import RUNS_MAX, ElasticFacts
from ckptd.transport import messages as m
from tests.ckptd.running import DaemonProcess

# Two experts in a layer, on three nodes of one slot; a holds expert 0, b and c hold expert 1.
SMALL: dict[str, Any] = {
    "loads": [[100, 300]],
    "nodes": [
        {"name": "a", "slots": 1, "labels": {"rack": "A"}, "holds": [[0]], "bytes_per_s": 50},
        {"name": "b", "slots": 1, "labels": {"rack": "B"}, "holds": [[1]], "bytes_per_s": 50},
        {"name": "c", "slots": 1, "labels": {"rack": "B"}, "holds": [[1]], "bytes_per_s": 50},
    ],
    "expert_bytes": 100,
    "threshold": 1,
    "step": 120,
}


def told(**changes: Any) -> m.Elastic:
    return msgspec.convert({**copy.deepcopy(SMALL), "expert_bytes": [[100]], **changes}, m.Elastic)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[Any], str]:
    def write(value: Any) -> str:
        path = tmp_path / "job.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    return write


# --- the answers -----------------------------------------------------------------------------------------


def test_what_a_placement_is_worth() -> None:
    found = situation(told())
    assert found.held is not None
    now = outlook(found, found.held)
    # Losing one of three: only a is fatal. Losing two: b and c, a and b or a and c all are.
    assert [(lost, chance.value) for lost, chance in now.recovery] == [(1, 2 / 3), (2, 0.0)]
    assert now.domain_recovery == ()
    assert now.tokens_LR.tolist() == [[100.0, 150.0, 150.0]]
    assert now.straggler == pytest.approx(150 / (400 / 3))


def test_racks_are_judged_beside_nodes() -> None:
    found = situation(told(domain="rack"))
    assert found.held is not None
    now = outlook(found, found.held)
    assert [(lost, chance.value) for lost, chance in now.domain_recovery] == [(1, 0.0)]
    assert "rack lost" in outlook_text(found, now, Canvas())


def test_the_loss_of_the_only_holder_needs_a_snapshot() -> None:
    lost = lose(situation(told()), ("a",))
    assert lost.gone == ((0, 0),)
    assert not isinstance(lost.planned, str)
    assert lost.planned.situation.names == ("b", "c")
    move = lost.planned.move
    assert move is not None
    # One of the two takes expert 0, which nobody has: 100 bytes at 50 bytes a second.
    assert (move.replicas, move.from_snapshots, move.lost) == (1, 1, ((0, 0),))
    assert (move.total_bytes, move.largest_bytes, move.snapshot_bytes) == (100, 100, 100)
    assert move.seconds == 2.0
    (fetch,) = move.fetches
    assert (fetch.source, fetch.replicas, fetch.bytes) == ("", 1, 100)
    text = lost_text(situation(told()), lost, Canvas())
    assert "1 expert loses every replica: layer 0 expert 0" in text
    assert "1 of them (100 B) from snapshots" in text


def test_a_loss_that_leaves_a_replica_comes_from_peers() -> None:
    lost = lose(situation(told()), ("b",))
    assert lost.gone == ()
    assert not isinstance(lost.planned, str)
    assert lost.planned.move is not None
    assert (lost.planned.move.replicas, lost.planned.move.from_snapshots) == (0, 0)


def test_who_gets_what_from_whom() -> None:
    """Two slots each from the start: without a, its neighbours hold expert 1 alone, and d expert 0 alone."""
    nodes = [
        {"name": name, "slots": 2, "holds": [held]}
        for name, held in (("a", [0, 1]), ("b", [1]), ("c", [1]), ("d", [0]))
    ]
    lost = lose(situation(told(nodes=nodes, threshold=3)), ("a",))
    assert lost.gone == ()
    assert not isinstance(lost.planned, str)
    assert lost.planned.move is not None
    found = {(one.receiver, one.source) for one in lost.planned.move.fetches}
    assert found in ({("b", "d"), ("c", "d"), ("d", "b")}, {("b", "d"), ("c", "d"), ("d", "c")})
    text = lost_text(situation(told(nodes=nodes)), lost, Canvas())
    assert "fetches from" in text
    assert "bytes_per_s)" in text


def test_of_many_fetches_those_who_get_most_are_shown() -> None:
    """Nobody holds anything: each of 40 nodes gets its experts from snapshots and n0 sends one to all."""
    loads = ((10,) * 40,)
    nodes = [m.ElasticNode(f"n{i}", 2, holds=((0,),) if i == 0 else ((),)) for i in range(40)]
    planned = plan(situation(m.Elastic(loads, tuple(nodes), expert_bytes=((100,),))))
    assert planned.move is not None
    assert len(planned.move.fetches) >= 39
    lines = planned_text(planned, Canvas()).splitlines()
    head = lines.index(next(line for line in lines if "sources" in line))
    rows = [line.split() for line in lines[head + 1 : -1]]
    sizes = [int(row[3]) for row in rows]
    assert len(rows) == 32
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == planned.move.largest_bytes
    assert lines[-1].endswith("more nodes (--json has all)")


def test_what_nodes_hold_is_taken_as_planned_where_nobody_tells() -> None:
    nodes = [{"name": name, "slots": 2} for name in "ab"]
    found = as_planned(situation(told(nodes=nodes)))
    assert found.held is not None
    assert found.held.counts.tolist() == [[[1, 1], [1, 1]]]
    assert lose(found, ("b",)).gone == ()


def test_too_few_slots_are_refused_with_the_reason() -> None:
    lost = lose(situation(told()), ("a", "b"))
    assert isinstance(lost.planned, str)
    assert "1 slots on 1 nodes cannot hold 2 experts" in lost.planned
    assert "NOT PLACED" in lost_text(situation(told()), lost, Canvas())
    everything = lose(situation(told()), ("a", "b", "c"))
    assert isinstance(everything.planned, str)
    assert "no node is left" in everything.planned


def unbalanced(**when: Any) -> m.Elastic:
    """Expert 1 has all the tokens and one replica: 300 on b against a mean of 100; with two, 150."""
    holds = ([[0]], [[1]], [[0]])
    nodes = [{**node, "holds": held} for node, held in zip(SMALL["nodes"], holds, strict=True)]
    return told(loads=[[0, 300]], nodes=nodes, when=when)


@pytest.mark.parametrize(
    ("when", "pays"),
    [
        # Half of expert_s is saved in each of 1000 steps; the move takes 2 s, and must be
        # outweighed by half more.
        ({"expert_s": 0.0059}, False),
        ({"expert_s": 0.0061}, True),
        ({"expert_s": 0.0061, "pause_s": 1.0}, False),
        ({"expert_s": 0.0061, "remaining_steps": 900}, False),
        ({}, None),
    ],
)
def test_the_next_time_follows_the_rule_of_the_running_job(when: dict[str, Any], pays: bool | None) -> None:
    found = situation(unbalanced(**when))
    assert found.held is not None
    coming = next_time(found, outlook(found, found.held), plan(found))
    assert (coming.straggler_now, coming.straggler_after) == (3.0, 1.5)
    assert coming.pays is pays
    assert coming.check_step == 150
    assert ("it pays:" in next_text(coming)) == (pays is True)
    if pays is None:
        assert coming.worth_from_s == pytest.approx(0.006)
        assert "0.006 s of each step" in next_text(coming)


def test_when_the_load_is_looked_at_counts_from_the_last_placement() -> None:
    found = situation(unbalanced(check_steps=50, placed_step=110, every_steps=200))
    assert found.held is not None
    coming = next_time(found, outlook(found, found.held), plan(found))
    assert (coming.check_step, coming.due_step) == (160, 310)


def test_nothing_is_gained_where_all_is_even() -> None:
    found = situation(told(loads=[[0, 0]]))
    assert found.held is not None
    coming = next_time(found, outlook(found, found.held), plan(found))
    assert coming.pays is False
    assert "it gains nothing" in next_text(coming)


# --- the map ---------------------------------------------------------------------------------------------


def test_the_map_counts_replicas_and_colours_only_where_it_may() -> None:
    found = situation(told())
    assert found.held is not None
    now = outlook(found, found.held)
    plain = outlook_text(found, now, Canvas())
    assert "\x1b" not in plain
    lines = plain.splitlines()
    assert lines[1:5] == ["   01", "a  1.  0.75", "b  .1  1.12", "c  .1  1.12"]
    colored = outlook_text(found, now, Canvas(color=True)).splitlines()
    hottest, cooler = (f"48;5;{color}m1" for color in (elastic_command._HEAT[-1], elastic_command._HEAT[6]))
    assert cooler in colored[2]
    assert hottest in colored[3]


def test_wide_layers_are_wrapped_and_many_nodes_cut() -> None:
    wide = m.Elastic(((1,) * 130,), tuple(m.ElasticNode(f"n{i}", 10) for i in range(45)), threshold=1)
    planned = plan(situation(wide))
    text = planned_text(planned, Canvas(columns=100))
    assert "and 5 more nodes" in text
    assert max(len(line) for line in text.splitlines() if line.startswith("n")) <= 100
    row = [line.split()[1] for line in text.splitlines() if line.startswith("n0 ")]
    assert sum(map(len, row)) == 130
    counts = [sum(cell.isdigit() for cell in part) for part in row]
    assert sum(counts) == int((planned.outlook.placement.counts[0, 0] > 0).sum())


# --- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "must contain a JSON object"),
        ({"loads": None}, r"\$.loads"),
        ({"loads": [[1.5, 2]]}, r"loads\[0\]\[0\] is 1.5: tokens and bytes must be whole"),
        (
            '{"loads": [[1, NaN]], "nodes": 2, "slots": 1}',
            r"loads\[0\]\[1\] is nan: tokens and bytes must be finite",
        ),
        ('{"loads": [[1, Infinity]], "nodes": 2, "slots": 1}', "is inf"),
        ({"loads": [[1, -2]]}, r"loads\[0\]\[1\] is -2: tokens and bytes cannot be negative"),
        ({"loads": [[1, 2], [3]]}, r"loads\[1\] has 1 experts"),
        ({"loads": []}, "loads is empty"),
        ({"loads": [[]]}, "loads is empty"),
        ({"loads": [["many", 2]]}, r"Expected `int`, got `str` - at `\$.loads\[0\]\[0\]`"),
        ({"nodes": []}, r"\$.nodes"),
        ({"nodes": 0, "slots": 1}, '"nodes": 0 must be a number from 1'),
        ({"nodes": 3}, 'needs "slots" in the same object'),
        ({"nodes": [{"name": "a", "slots": 0}]}, r"slots"),
        ({"nodes": [{"name": "a"}]}, "missing required field `slots`"),
        ({"nodes": [{"name": "a", "slots": 2}] * 2}, "two nodes have the name a"),
        ({"nodes": [{"name": "a", "slots": 2, "rack": "A"}]}, "unknown field `rack`"),
        ({"nodes": [{"name": "a", "slots": 2, "holds": [[2]]}]}, "holds expert 2 of layer 0"),
        (
            {"nodes": [{"name": "a", "slots": 2, "holds": [[0], [1]]}]},
            "of 2 layers, but loads have 1",
        ),
        ({"domain": "row"}, "is 'row', but node a has no such label"),
        ({"expert_bytes": [[1, 2, 3]]}, "expert_bytes has the shape"),
        ({"expert_bytes": [[1.0, 2]]}, r"expert_bytes\[0\]\[0\] is 1.0"),
        ({"max_straggler": 0.9}, "max_straggler is 0.9"),
        ({"threshold": 0}, "threshold"),
        ({"layers": ["a", "b"]}, "2 names of layers for 1 rows"),
        ({"history": [[[1]]]}, r"history\[0\] must have the shape of loads"),
        ({"load": 3}, "unknown field `load`"),
        ({"runs": []}, "exactly one run"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_words(file: Any, change: Any, said: str) -> None:
    text = file(change if isinstance(change, str) else {**SMALL, **change})
    with pytest.raises(CommandError, match=said):
        situation(read_file(text))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(CommandError, match="cannot be read"):
        read_file("/nowhere/job.json")


def test_abbreviations_mean_what_they_say(file: Any) -> None:
    short = {"loads": [[0, 0, 5]], "nodes": 2, "slots": 3, "ranks": 2, "expert_bytes": 7}
    found = situation(read_file(file({**short, "max_straggler": None})))
    assert found.names == ("0", "1")
    assert found.cluster.ranks == (2, 2)
    assert found.cluster.slots.tolist() == [3, 3]
    assert found.expert_bytes_LE is not None
    assert found.expert_bytes_LE.tolist() == [[7, 7, 7]]
    assert (found.held, found.max_straggler) == (None, None)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["elastic", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_plan_from_a_file(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", file(SMALL), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["placement"] == [[[0], [1], [1]]]
    assert found["recovery"][0] == {"lost": 1, "probability": 2 / 3, "error": 0.0, "exact": True}
    assert found["move"]["replicas"] == 0
    code, out, _ = run(capsys, "plan", file(SMALL))
    assert code == 0
    assert "no transfers: every node holds" in out
    assert "any" not in found["guarantee"] or "no node may be lost" in found["guarantee"]


def test_one_node_and_no_load_are_planned(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", file({"loads": [[0, 0]], "nodes": 1, "slots": 2}))
    assert code == 0
    assert "the job has only one" in out


def test_too_few_slots_end_with_a_status(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", file({"loads": [[1, 2, 3]], "nodes": 2, "slots": 1}), "--json")
    assert code == 1
    assert "2 slots on 2 nodes cannot hold 3 experts" in err
    assert json.loads(out)["exit_status"] == 1


def test_a_wrong_file_or_layer_is_wrong_usage(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", file({"loads": [[-1]], "nodes": 1, "slots": 1}))
    assert (code, "cannot be negative" in err) == (2, True)
    code, _, err = run(capsys, "plan", file(SMALL), "--layer", "3")
    assert (code, "the layers are 0 to 0" in err) == (2, True)
    code, _, err = run(capsys, "whatif", file(SMALL), "--lose", "rack=Z")
    assert (code, "rack=A|B" in err) == (2, True)


def test_what_if_from_a_file(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "whatif", file(SMALL), "--lose", "rack=A", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["lost_nodes"], found["lost_experts"]) == (["a"], [[0, 0]])
    assert found["recoverable"] is None  # a file tells of no snapshots
    assert found["planned"]["nodes"] == ["b", "c"]
    code, out, _ = run(capsys, "whatif", file(SMALL), "--lose", "node=b", "--json")
    assert json.loads(out)["recoverable"] is True
    code, out, _ = run(capsys, "whatif", file(SMALL), "--lose", "node=b,rack=A")
    assert code == 1
    assert "NOT PLACED" in out


# --- running jobs ----------------------------------------------------------------------------------------


def test_a_daemon_keeps_the_last_of_each_run_and_of_few_runs() -> None:
    facts = ElasticFacts()
    for number in range(RUNS_MAX + 1):
        facts.tell(RankKey("job", f"run-{number}", 0), told(), 0.0)
    facts.tell(RankKey("job", "run-3", 5), told(step=9), 2.0)
    seen = facts.seen("", "", 10.0).told
    assert len(seen) == RUNS_MAX
    assert "run-0" not in {one.run for one in seen}
    (one,) = facts.seen("job", "run-3", 10.0).told
    assert (one.rank, one.ago_s, one.elastic.step) == (5, 8.0, 9)
    facts.forget("job", "run-3")
    assert facts.seen("job", "run-3", 10.0).told == ()


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    found = DaemonProcess(node_id="a")
    try:
        found.start()
        yield found
    finally:
        found.clean_up()


def test_a_job_is_shown_planned_and_lost_as_it_told(
    daemon: DaemonProcess, file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*args: str, code: int = 0) -> Any:
        found, out, err = run(capsys, *args, "--json", "--endpoint", daemon.endpoint)
        assert found == code, err
        return json.loads(out)

    with daemon.client() as client:
        assert "no elastic job has reported" in ask("show", code=4)["error"]
        client.send(m.TellElastic(told()))  # not attached: refused, and nothing is known
        client.ask(m.Hello("1", 1), m.Welcome)
        client.ask(m.Attach("job", "run", 0, 1, "t", 1, 0), m.Attached)
        assert "no elastic job has reported" in ask("show", code=4)["error"]
        client.send(m.TellElastic(told(history=[[[1, 3]]], method="by hand")))
        client.ask(m.Ping(), m.Pong)  # answered in order: it has been read
        shown = ask("show")
        (one,) = shown["runs"]
        assert (one["job"], one["run"], one["rank"]) == ("job", "run", 0)
        assert one["now"]["placement"] == [[[0], [1], [1]]]
        assert one["history"] == [0.75, 0.75]
        assert one["next"]["pays"] is False
        _, text, _ = run(capsys, "show", "--endpoint", daemon.endpoint)
        assert "by hand" in text
        assert "\x1b" not in text
        # What show printed is what plan and whatif read, and both answer alike with and without the file.
        for question, *more in (("plan",), ("whatif", "--lose", "node=b")):
            live = ask(question, *more)
            live.pop("snapshots", None)
            assert live == ask(question, file(shown), *more)
        # Expert 0 was on a alone, and nothing of this run is in memory.
        found = ask("whatif", "--lose", "rack=A", code=1)
        assert (found["recoverable"], found["lost_experts"]) == (False, [[0, 0]])
        assert "no reachable node holds a snapshot" in found["snapshots"]["reason"]
        client.ask(m.Detach(final=True), m.Done)
    assert "no elastic job has reported" in ask("show", code=4)["error"]


def test_numbers_of_a_plan_are_those_of_the_planners() -> None:
    """The bound of the file reaches the planner; without it the hot expert's nodes compute more."""
    skew = [480, 390, 20, 15, 14, 12, 11, 10, 9, 8, 8, 7, 6, 5, 4, 1]
    nodes = tuple(m.ElasticNode(f"n{i}", 6) for i in range(10))
    free = plan(situation(m.Elastic((tuple(skew),), nodes)))
    bound = plan(situation(m.Elastic((tuple(skew),), nodes, max_straggler=1.05)))
    assert free.outlook.straggler > 1.7
    assert bound.outlook.straggler <= 1.05
    assert dict(free.outlook.recovery)[4].value == pytest.approx(0.738, abs=1e-3)
    assert np.isclose(free.outlook.tokens_LR.sum(), sum(skew))
    with pytest.raises(ElasticError):
        plan(situation(m.Elastic((tuple(skew),), nodes[:2])))
