"""Localized recovery: who lost its state works again, the others go on where they were; and all end
at the exact bits.

Every life is real processes over gloo, torn down as torchrun does it: SIGKILL to the victims,
SIGTERM to the survivors, which fail or hang. ``CKPTD_LONG=1`` plays all of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.ctl.main import main as ckptctl
from tests.ckptd.nodes import PATIENT_S, Net
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.localized import KILL_AT, References, Story, damage
from tests.e2e.test_quarantine import FIRST, SECOND
from tests.long import long

pytestmark = pytest.mark.slow


# A case of ``parallel/`` and its number of ranks, as a run that something may happen to.
Run = Callable[[str, int], Story]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture
def a_run(jobs: Jobs, daemon: DaemonProcess, references: References) -> Iterator[Run]:
    with contextlib.ExitStack() as stack:

        def begin(case: str, ranks: int) -> Story:
            story = Story(jobs, daemon, references, case, ranks=ranks)
            return stack.enter_context(contextlib.closing(story))

        yield begin


@pytest.fixture
def chain(a_run: Run) -> Story:
    """Four stages, one on each rank."""
    return a_run("localized/chain", 4)


@pytest.fixture
def hurt(tmp_path: Path, references: References) -> Iterator[Story]:
    """A chain with a daemon of its own, whose memory may be damaged."""
    with own_daemon() as daemon:
        jobs = Jobs(tmp_path, daemon.endpoint)
        with contextlib.closing(Story(jobs, daemon, references, "localized/chain", ranks=4)) as story:
            yield story


def assert_told(story: Story, *texts: str) -> None:
    """The newest reason for where this run went on has all of this in it."""
    newest = story.reasons()[-1]
    assert [text for text in texts if text not in newest] == [], story.told


# -- which ranks work again -----------------------------------------------------------------------


def test_a_lost_stage_replays_alone(chain: Story) -> None:
    """And ``ckptctl events`` tells who did what, and why."""
    chain.lose(1)
    chain.ends_exact()
    chain.assert_only(1)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        ckptctl(["events", "--json", "--endpoint", chain.daemon.endpoint])
    events = [e for e in json.loads(told.getvalue())["events"] if e["run"] == chain.run]
    # Of who was in too much of a hurry to tell, the daemon tells.
    assert sorted(e["rank"] for e in events if e["kind"] == "parked") == [0, 2, 3]
    together_at = f"all ranks run together again from iteration {KILL_AT}"
    told_by_all = [e["message"].split("; loaded")[0] for e in events if e["kind"] == "restored"]
    (restored,) = {message[message.index(together_at) :] for message in told_by_all}
    assert f"ranks 0, 2, 3 parked at {KILL_AT}" in restored
    assert "rank 1 replaying from" in restored
    (together,) = [e["message"] for e in events if e["kind"] == "together"]
    assert f"from iteration {KILL_AT} on" in together
    phases = {e["rank"]: e["message"] for e in events if e["kind"] == "recovery_phases"}
    assert sorted(phases) == [0, 1, 2, 3], chain.told
    assert [rank for rank in sorted(phases) if " replayed " in phases[rank]] == [1], phases
    assert all(f"the first new iteration is {KILL_AT}:" in text for text in phases.values()), phases


def test_a_lost_stage_whose_newest_snapshot_was_sealed_wrong_says_so(chain: Story) -> None:
    """With a window of 1 it replayed nothing that was compared, went on from the wrong state, and
    drew the others after it, silently.

    Now it begins one iteration earlier. What it finds makes all ranks recover together, where two
    replays that come to the same result decide.
    """
    # Steps that leave time to seal each snapshot: on a busy machine there was no older one to go back to.
    chain.options += ("--set", "window=1", "--step-ms", "100")
    torn = KILL_AT - 1  # it dies before that of its last step is sealed
    deadly = ("--kill-at", str(KILL_AT), "--kill-point", "top", "--kill-delay-ms", "500")
    chain.life({1: (*deadly, "--tear-at", str(torn))}).torn_down(1)
    logs = chain.life().ranks.end_by_a_failure()
    assert f"rank 1 replaying from {torn - 1}, exact at {torn}" in logs, chain.told
    assert f"ReplayMismatch: replay of iteration {torn - 1} did not reproduce" in logs, chain.told
    for wanted in (FIRST, SECOND):
        assert wanted in chain.life().ranks.end_by_a_failure(), chain.told
    chain.ends_exact()


def test_a_lost_stage_with_a_window_of_one_compares_all_that_it_loads(chain: Story) -> None:
    chain.options += ("--set", "window=1")
    chain.lose(1)
    life = chain.ends_exact()
    chain.assert_only(1)
    reports = [chain.jobs.report(out) for _, out in life.ranks.started]
    assert [report["replayed_steps"] for report in reports] == [0, 1, 0, 0], chain.told
    assert reports[1]["verified_tensors"] > 0
    assert "goes on from its parked state, which was read from the live tensors" in chain.jobs.log(
        life.ranks.started[0][1]
    )


def test_a_lost_replica_copies_its_twin_and_nobody_replays(a_run: Run) -> None:
    story = a_run("localized/replicas", 4)
    story.lose(2, point="inside")
    story.ends_exact()
    story.assert_only()
    assert_told(story, f"rank 2 with a peer's state of {KILL_AT}", "ranks 0, 1, 3 parked at")


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("ddp/plain", 2),
        pytest.param("fsdp/plain", 2, marks=long),
        pytest.param("localized/chain", 4, marks=long),
    ],
)
def test_whoever_is_asked_to_go_is_parked_and_replays_nothing(a_run: Run, case: str, ranks: int) -> None:
    """SIGTERM to all, as a scheduler that preempts the job sends it."""
    story = a_run(case, ranks)
    story.options += ("--set", "park=true")
    life = story.life(dict.fromkeys(range(ranks), ("--linger-at", str(KILL_AT))))
    life.reach(KILL_AT)
    life.torn_down()
    codes = [process.exitcode for process in life.processes]
    assert codes == [-signal.SIGTERM] * ranks, story.told
    story.ends_exact()
    story.assert_only()


@long
@pytest.mark.parametrize("victims", [(0,), (3,), (1, 2), (0, 2), (0, 1, 3)], ids=str)
def test_the_lost_replay_and_nobody_else(chain: Story, victims: tuple[int, ...]) -> None:
    """Neighbours together; others each from a start of its own."""
    chain.lose(*victims)
    chain.ends_exact()
    chain.assert_only(*victims)


@long
@pytest.mark.parametrize("point", ["backward", "step", "after"])
def test_wherever_in_its_step_it_is_lost(a_run: Run, point: str) -> None:
    """No norm is shared: a neighbour may have gone on to the next step, or not."""
    story = a_run("localized/own_norm", 4)
    story.lose(1, point=point)
    story.ends_exact()
    story.assert_only(1)


@long
def test_stages_that_were_a_step_apart(a_run: Run) -> None:
    """Rank 1 has all it needs of the step and dies before it sends on: those behind it end the
    step, the one before it does not.
    """
    story = a_run("localized/own_norm", 4)
    story.lose(1, point="inside")
    story.ends_exact()
    story.assert_only(1)
    ahead = f"ranks 2, 3 parked at {KILL_AT + 1}"
    assert_told(story, f"rank 0 parked at {KILL_AT}", ahead, "rank 1 replaying from")


@long
@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("fused", 4),
        ("interleaved", 3),
        ("zero_bubble", 3),
        ("accumulating", 3),
        ("autocast", 3),
        ("by_hand", 3),
    ],
)
def test_every_kind_of_pipeline(a_run: Run, case: str, ranks: int) -> None:
    story = a_run(f"localized/{case}", ranks)
    story.lose(1, point="backward")
    story.ends_exact()
    story.assert_only(1)


@long
@pytest.mark.parametrize(
    ("victims", "replay"),
    [((0, 2), (0, 2)), ((1, 3), (1, 3)), ((0, 1), ()), ((1, 2), ())],
    ids=str,
)
def test_replicas_of_which_more_is_lost(
    a_run: Run, victims: tuple[int, ...], replay: tuple[int, ...]
) -> None:
    """Both twins of a stage replay together; a whole replica copies the other one; each may copy its own."""
    story = a_run("localized/replicas", 4)
    story.lose(*victims, point="inside")
    story.ends_exact()
    story.assert_only(*replay)


@long
def test_a_lost_replica_without_a_snapshot_of_that_step_replays_with_its_twin(a_run: Run) -> None:
    """Its random state of the step is in no snapshot that was complete: it had not begun its forward."""
    story = a_run("localized/replicas", 4)
    story.lose(2, point="top")
    story.ends_exact()
    story.assert_only(0, 2)


@long
def test_survivors_that_hang_are_parked(chain: Story) -> None:
    """The victim stops with all its connections open, so nothing fails in the others: they wait in
    gloo when SIGTERM comes.
    """
    life = chain.life({2: ("--linger-at", str(KILL_AT))})
    life.reach(KILL_AT)
    life.send(signal.SIGSTOP, [2])
    life.send(signal.SIGTERM, [0, 1, 3])
    for rank in (0, 1, 3):
        life.processes[rank].join(30)
        assert life.processes[rank].exitcode == -signal.SIGTERM, chain.told
    life.ranks.kill()
    chain.ends_exact()
    chain.assert_only(2)


# -- a second failure -----------------------------------------------------------------------------


def second_loss(story: Story, rank: int, begun: int) -> None:
    """In the next life this rank dies at the top of the n-th step that it begins."""
    dies = ("--kill-begun", str(begun), "--kill-point", "top", "--kill-delay-ms", "500")
    story.life({rank: dies}).torn_down(rank)


@long
@pytest.mark.parametrize("begun", [1, 3])
def test_a_second_loss_of_the_one_that_replays(chain: Story, begun: int) -> None:
    chain.lose(1)
    second_loss(chain, 1, begun)
    chain.ends_exact()
    chain.assert_only(1)


@long
@pytest.mark.parametrize("waiting", [0, 2])
def test_a_loss_of_one_that_waits(chain: Story, waiting: int) -> None:
    """What it had parked is there still: nobody else has to replay."""
    chain.lose(1)
    life = chain.life({1: ("--step-ms", "500")})
    life.reach_replay(1)
    assert life.traces[waiting].begun == []
    life.send(signal.SIGKILL, [waiting])
    life.torn_down(waiting)
    chain.ends_exact()
    chain.assert_only(1)


@long
def test_a_loss_when_all_have_come_together_costs_nothing(chain: Story) -> None:
    """The one that replayed is parked where the others were, which are so still."""
    chain.lose(1)
    second_loss(chain, 2, 1)
    chain.ends_exact()
    chain.assert_only()


@long
def test_a_loss_after_the_recovery(chain: Story) -> None:
    """Another stage, when all have run together for a while: it goes on from what it had parked
    before, or from snapshots.
    """
    chain.lose(1)
    dies = ("--kill-at", str(KILL_AT + 2), "--kill-point", "top", "--kill-delay-ms", "500")
    chain.life({2: dies}).torn_down(2)
    chain.ends_exact()
    again = [chain.again(rank) for rank in range(4)]
    assert again[2][-2:] == [KILL_AT, KILL_AT + 1], chain.told
    assert (again[0], again[1], again[3]) == ([], [], []), chain.told


@long
def test_the_third_time_all_recover_together(chain: Story) -> None:
    """Two localized recoveries in a row did not come to their end: something may be wrong with them."""
    chain.lose(1)
    for _ in range(2):
        second_loss(chain, 1, 2)
    chain.ends_exact()
    chain.assert_everybody_replayed()
    (why,) = chain.reasons("not_localized")
    assert "two localized recoveries in a row have not come to their end" in why


# -- what is missing ------------------------------------------------------------------------------


def remove(story: Story, rank: int, kind: str) -> None:
    """Nothing of this kind is left of this rank: a new daemon does not find it."""
    story.daemon.kill()
    found = list(story.daemon.segment_dir.glob(f"e2e~{story.run}~r{rank}~*.{kind}"))
    assert found
    for path in found:
        path.unlink()
    story.daemon.start()


def hurts(story: Story, rank: int, kind: str) -> None:
    damage(story.daemon.segment_dir, story.run, rank, kind)


@long
def test_a_neighbour_whose_log_is_gone_replays_too(hurt: Story) -> None:
    hurt.lose(1)
    remove(hurt, 2, "boundary")
    hurt.ends_exact()
    hurt.assert_only(1, 2)
    assert_told(hurt, "rank 1 needs the log of rank 2 of iteration", "which no node holds")


@long
def test_a_survivor_whose_parked_state_is_gone_replays(hurt: Story) -> None:
    hurt.lose(0)
    remove(hurt, 2, "parked")
    hurt.ends_exact()
    hurt.assert_only(0, 2)


@long
def test_damage_in_a_parked_state_is_noticed_and_that_rank_replays(hurt: Story) -> None:
    hurt.lose(1)
    hurts(hurt, 3, "parked")
    hurt.ends_exact()
    hurt.assert_only(1, 3)
    (why,) = hurt.reasons("parked_unusable")
    assert "is damaged" in why


@long
def test_damage_in_a_log_is_noticed_and_the_run_comes_back(hurt: Story) -> None:
    """It is found when it is read, by then the plan is made: that life fails, and the next ones plan without."""
    hurt.lose(1)
    hurts(hurt, 2, "boundary")
    logs = hurt.life().ranks.end_by_a_failure()
    assert "the log of rank 2 of iteration" in logs
    hurt.ends_exact()


@long
def test_where_all_are_lost_all_replay(chain: Story) -> None:
    chain.lose(0, 1, 2, 3)
    chain.ends_exact()
    chain.assert_everybody_replayed()


# -- on several nodes -----------------------------------------------------------------------------


@long
@pytest.mark.parametrize(
    ("case", "victim", "replays"), [("chain", 1, (1,)), ("chain", 2, (2,)), ("replicas", 2, ())]
)
def test_what_lies_on_another_node_is_brought(
    tmp_path: Path, references: References, case: str, victim: int, replays: tuple[int, ...]
) -> None:
    """The log of a neighbour; the parked state of a twin."""
    with (
        Net(2, peer_deadline_s=PATIENT_S).up() as net,
        on_two_nodes(net, tmp_path, references, case) as story,
    ):
        story.lose(victim, point="inside" if case == "replicas" else "top")
        story.ends_exact()
        story.assert_only(*replays)


@long
def test_a_lost_node_whose_ranks_move_to_the_other(tmp_path: Path, references: References) -> None:
    """Its snapshots have replicas there; its parked states, logs and facts are gone."""
    with Net(2).up() as net, on_two_nodes(net, tmp_path, references, "chain") as story:
        life = story.life(dict.fromkeys((2, 3), ("--kill-at", str(KILL_AT), "--kill-point", "top")))
        life.torn_down(2, 3)
        net[1].lose()
        story.endpoints = [net[0].endpoint] * 4
        story.ends_exact()
        story.assert_only(2, 3)


@long
def test_ranks_that_change_their_nodes_take_along_what_they_had_parked(
    tmp_path: Path, references: References
) -> None:
    """The launcher has numbered the processes anew. What rank 1 is fed comes from where the others
    were before.
    """
    with (
        Net(2, peer_deadline_s=PATIENT_S).up() as net,
        on_two_nodes(net, tmp_path, references, "chain") as story,
    ):
        story.lose(1)
        story.endpoints = [net[1].endpoint] * 2 + [net[0].endpoint] * 2
        story.ends_exact()
        story.assert_only(1)
        assert_told(story, f"ranks 0, 2, 3 parked at {KILL_AT} on another node", "rank 1 replaying")


@long
def test_a_second_loss_while_those_who_moved_wait(tmp_path: Path, references: References) -> None:
    """Their parked states are where they were before, and so are their logs; and a third life plans
    from the same.
    """
    with (
        Net(2, peer_deadline_s=PATIENT_S).up() as net,
        on_two_nodes(net, tmp_path, references, "chain") as story,
    ):
        story.lose(1)
        story.endpoints = [net[1].endpoint] * 2 + [net[0].endpoint] * 2
        second_loss(story, 1, 2)
        story.ends_exact()
        story.assert_only(1)


@long
def test_a_lost_node_for_which_a_spare_one_comes_and_all_ranks_move(
    tmp_path: Path, references: References
) -> None:
    """Those who are left become the first ranks, whose snapshots have replicas there; the others
    take along what they had parked.
    """
    with Net(3).up() as net, on_two_nodes(net, tmp_path, references, "chain") as story:
        life = story.life(dict.fromkeys((0, 1), ("--kill-at", str(KILL_AT), "--kill-point", "top")))
        life.torn_down(0, 1)
        net[0].lose()
        story.endpoints = [net[1].endpoint] * 2 + [net[2].endpoint] * 2
        story.ends_exact()
        story.assert_only(0, 1)
        assert net[2].saw("restored", f"ranks 2, 3 parked at {KILL_AT} on another node")


@long
def test_damage_in_a_parked_state_on_another_node_is_noticed_and_that_rank_replays(
    tmp_path: Path, references: References
) -> None:
    """At the first start: who wants it cannot put it into quarantine, and tells the others that it
    has no use for it.
    """
    with (
        Net(2, peer_deadline_s=PATIENT_S).up() as net,
        on_two_nodes(net, tmp_path, references, "chain") as story,
    ):
        story.lose(1)
        damage(net[1].segment_dir, story.run, 3, "parked")
        story.endpoints = [net[1].endpoint] * 2 + [net[0].endpoint] * 2
        story.ends_exact()
        story.assert_only(1, 3)
        assert net[0].saw("parked_unusable", "could not be brought here")


@long
@pytest.mark.parametrize("case", ["replicated_logs", "replicas"])
def test_a_stage_and_the_node_of_its_logging_neighbour(
    tmp_path: Path, references: References, case: str
) -> None:
    """Both twins of stage 0 are lost (ranks 0 and 2, on the first node), and the second node with
    rank 1 of stage 1, whose twin 3 is left.

    Rank 1 can copy that twin only if what it had sent to rank 0 is to be had: from a replica of its
    log. Without one all replay.
    """
    with (
        Net(2).up() as net,
        on_two_nodes(net, tmp_path, references, case, second=(1,)) as story,
    ):
        inside = ("--kill-at", str(KILL_AT), "--kill-point", "inside", "--kill-delay-ms", "20000")
        life = story.life({1: (*inside, "--kill-sealed")})
        life.kill_with(1, 0, 2)
        life.torn_down(0, 1, 2)
        net[1].lose()
        story.endpoints = [net[0].endpoint] * 4
        story.ends_exact()
        if case == "replicas":
            story.assert_everybody_replayed()
            return
        story.assert_only(0, 2)
        assert_told(
            story,
            f"rank 1 with a peer's state of {KILL_AT}",
            f"rank 3 parked at {KILL_AT}",
            "ranks 0, 2 replaying from",
        )


@contextlib.contextmanager
def on_two_nodes(
    net: Net, folder: Path, references: References, case: str, second: tuple[int, ...] = (2, 3)
) -> Iterator[Story]:
    """These ranks on the second, the others on the first."""
    one, other = net.nodes[:2]
    daemon = DaemonProcess(one.runtime_dir, one.segment_dir)
    ends = [(other if rank in second else one).endpoint for rank in range(4)]
    jobs, case = Jobs(folder, one.endpoint), f"localized/{case}"
    story = Story(jobs, daemon, references, case, ranks=4, endpoints=ends)
    with contextlib.closing(story):
        yield story


# -- negative controls ----------------------------------------------------------------------------


@long
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("fed record", "it is not in the log"),
        ("fed bits", "sent other tensors than its log contains"),
    ],
)
def test_a_wrong_feed_is_noticed(chain: Story, what: str, text: str) -> None:
    """And the next life, which is fed right, is exact."""
    chain.lose(1)
    logs = chain.life({1: ("--leave-out", what)}).ranks.end_by_a_failure()
    assert text in logs, chain.told
    chain.ends_exact()


@long
def test_a_wrong_feed_that_is_not_heeded_shows_in_the_end(chain: Story) -> None:
    chain.lose(1)
    warns = ("--set", 'on_mismatch="warn"')
    life = chain.life({1: ("--leave-out", "fed bits")}, *warns)
    assert chain.differs(life) == [0, 1, 2, 3]


@long
@pytest.mark.parametrize("what", ["random state", "parked weight"])
def test_what_is_left_out_of_a_parked_state_shows_in_the_end(chain: Story, what: str) -> None:
    """Nothing is replayed there that could be compared: so the comparison of the other tests must see it."""
    chain.lose(1)
    life = chain.life({3: ("--leave-out", what)})
    assert 3 in chain.differs(life)


@long
def test_a_copy_with_the_peers_buffers_shows_in_the_end(a_run: Run) -> None:
    story = a_run("localized/replicas", 4)
    story.lose(2, point="inside")
    life = story.life({2: ("--leave-out", "own buffers")})
    assert story.differs(life) == [2]
