"""What is told of a placement is what it is, and what cannot be told is refused here and not by the daemon."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.client.elastic.job.placement_report import PlacementTeller, Placing, reported_placement
from ckptd.core.elastic.allocation import allocate
from ckptd.core.elastic.elastic_types import Cluster
from ckptd.core.elastic.expert_placement import place
from ckptd.ctl.elastic_answers import situation
from ckptd.errors import ElasticError
from ckptd.transport.messages import Elastic, ElasticWhen

LOADS = [[70, 20, 9, 1], [25, 25, 25, 25]]
BYTES = np.full((2, 4), 1000)


def placing(domains: tuple[str, ...] = ()) -> Placing:
    cluster = Cluster.uniform(3, 3, domains, ranks=2)
    plan = place(allocate(LOADS, cluster, 2), LOADS, cluster, max_straggler=1.2)
    return Placing(plan.placement, cluster, ("a", "b", "c"), BYTES, 2, 1.2, method=plan.method)


@pytest.mark.parametrize("domains", [(), ("r", "r", "s")])
def test_what_is_told_is_read_as_what_it_was(domains: tuple[str, ...]) -> None:
    own = placing(domains)
    found = situation(reported_placement(own, LOADS, step=7))
    assert found.names == ("a", "b", "c")
    assert found.held == own.placement
    assert found.loads_LE.tolist() == LOADS
    assert found.expert_bytes_LE is not None
    assert found.expert_bytes_LE.tolist() == BYTES.tolist()
    assert found.cluster.ranks == own.cluster.ranks
    assert found.cluster.slots.tolist() == own.cluster.slots.tolist()
    assert found.cluster.domain_ids.tolist() == own.cluster.domain_ids.tolist()
    assert (found.max_straggler, found.report.threshold, found.report.step) == (1.2, 2, 7)
    assert found.speeds_N is None


def test_a_teller_tells_the_last_periods_with_the_placement() -> None:
    sent: list[Elastic] = []
    teller = PlacementTeller(sent.append, periods=2)
    teller.measured(0, LOADS)
    assert not sent  # nothing is placed yet
    teller.placed(1, placing(), LOADS, when=ElasticWhen(check_steps=5))
    for step in (2, 3, 4):
        teller.measured(step, [[step] * 4, [0] * 4])
    assert [told.step for told in sent] == [1, 2, 3, 4]
    assert sent[0].history == (tuple(map(tuple, LOADS)),)
    assert sent[-1].loads == ((4,) * 4, (0,) * 4)
    assert [period[0] for period in sent[-1].history] == [(2,) * 4, (3,) * 4]
    assert {told.when.check_steps for told in sent} == {5}
    assert sent[-1].nodes == sent[0].nodes


def test_no_history_is_told_where_none_is_wanted() -> None:
    sent: list[Elastic] = []
    teller = PlacementTeller(sent.append, periods=0)
    teller.placed(1, placing(), LOADS)
    teller.measured(2, LOADS)
    assert [told.history for told in sent] == [(), ()]


def test_what_does_not_fit_together_is_refused_and_not_sent() -> None:
    sent: list[Elastic] = []
    teller = PlacementTeller(sent.append)
    own = placing()
    with pytest.raises(ValueError, match="loads of shape"):
        teller.placed(1, own, [[1, 2]])
    with pytest.raises(ValueError, match="must be integers"):  # NaN is no integer, either
        teller.placed(1, own, np.array(LOADS) / 3)
    short = Placing(own.placement, own.cluster, ("a", "b"), BYTES, 2)
    with pytest.raises(ValueError, match="names, labels and speeds for 3 nodes"):
        teller.placed(1, short, LOADS)
    named = Placing(own.placement, own.cluster, ("a", "b", "c/d"), BYTES, 2)
    with pytest.raises(ValueError, match="cannot be reported"):
        teller.placed(1, named, LOADS)
    other = Placing(own.placement, Cluster.uniform(3, 1), ("a", "b", "c"), BYTES, 2)
    with pytest.raises(ElasticError, match="slots"):
        teller.placed(1, other, LOADS)
    assert not sent
    teller.placed(1, own, LOADS)
    with pytest.raises(ValueError, match=r"loads of shape \(1, 4\), a placement of \(2, 4\)"):
        teller.measured(2, LOADS[:1])
    assert len(sent) == 1
