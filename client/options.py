"""The options of ``Checkpointer`` in groups: run, daemon, snapshots, recovery, and the model's layout.

Each group is frozen and checks itself when it is made. All of its fields are keywords.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

from ckptd.core.interval_control import MAX_STALL, IntervalRule
from ckptd.core.partial_experts import LOST_TOKENS_LIMIT, Selection
from ckptd.core.recovery.global_plan import VERIFY_ITERATIONS
from ckptd.core.schedule import Ordering
from ckptd.core.snapshot_policy import PartialScope

if TYPE_CHECKING:
    from torch import Tensor

    from ckptd.client.model.operators import Grouping
    from ckptd.core.elastic.rebalance_policy import TimesConfig

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_WINDOW = 64
_SHOWN_CHARACTERS = 60
_PAGE = "docs/integration.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The identity of this trainer. None takes the value from torchrun's environment.

    Raises:
        ValueError: a name or a number is unusable.
    """

    name: str | None = None
    """The run, 1 to 64 letters, digits, ``.``, ``_`` or ``-``. A start under the same job and run
    resumes it. None: torchrun's ``--rdzv-id`` if one was chosen, or ``default``."""

    job: str | None = None
    """The job, in the same characters. None: named after the script and the folder in which it was
    started; it begins with ``u<uid>.`` if ``CKPTD_DAEMON_USER`` names another user."""

    rank: int | None = None
    """The number of this process in the run, from 0. None: ``RANK``, or 0."""

    world_size: int | None = None
    """The number of processes that train this run. None: ``WORLD_SIZE``, or 1. With 1 the process
    asks no other rank, even if there is a process group."""

    topology: str = ""
    """Any text, such as a parallel layout; a restart is accepted only with the same text."""

    def __post_init__(self) -> None:
        for what, name in (("run", self.name), ("job", self.job)):
            if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise ValueError(f"{what}={name!r}: use 1 to 64 letters, digits, '.', '_' or '-'")
        rank, world_size = self.rank, self.world_size
        for what, number in (("rank", rank), ("world_size", world_size)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                raise ValueError(f"{what}={number!r}: pass a whole number, or None")
        if rank is not None and not 0 <= rank < (rank + 1 if world_size is None else world_size):
            raise ValueError(f"rank={rank} is not in [0, world_size={world_size})")
        if world_size is not None and world_size < 1:
            raise ValueError(f"world_size={world_size}: pass a number from 1 on, or None")
        if not isinstance(self.topology, str):
            raise ValueError(  # noqa: TRY004 - one kind of error for all values
                f"topology={self.topology!r}: pass a text, or leave it out"
            )

    def completed(self, **defaults: Any) -> Self:
        """A copy with these values in place of None."""
        return replace(self, **{k: v for k, v in defaults.items() if getattr(self, k) is None})


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """The daemon that keeps the snapshots.

    Raises:
        ValueError: a value is unusable.
    """

    endpoint: str | None = "auto"
    """``"auto"``: this user's daemon; one is started if none answers. ``"ipc:///path"``: the daemon
    at that socket. None turns everything off: the loop runs as without ckptd."""

    required: bool = True
    """Treat a refused attach, or a daemon that does not answer, as an error. Otherwise all ranks
    continue unprotected, as with ``daemon=None``: one log line says why, and the counter
    ``unprotected`` is 1."""

    timeout_s: float = 30.0
    """Seconds for which the start waits for the daemon."""

    replicas: int | None = None
    """The number of other nodes that keep each snapshot. None: the daemons' configuration."""

    def __post_init__(self) -> None:
        endpoint = self.endpoint
        if endpoint not in (None, "auto") and not str(endpoint).startswith("ipc:///"):
            raise ValueError(
                f"daemon={endpoint!r}: use 'auto', None, or an endpoint such as 'ipc:///run/ckptd/ckptd.sock'"
            )
        if self.required not in (True, False):
            raise ValueError(f"required={self.required!r}: pass True or False")
        if not _is_number(self.timeout_s) or not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s!r}: pass seconds above 0")
        if self.replicas is not None and not _is_count(self.replicas):
            raise ValueError(f"replicas={self.replicas!r}: pass a number of nodes, or None")

    @property
    def off(self) -> bool:
        return self.endpoint is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialOptions:
    """The experts that partial snapshots hold (``SnapshotOptions(policy="partial")``).

    Raises:
        ValueError: a value is unusable.
    """

    experts: int | None = None
    """K: of each layer, the experts in one snapshot. None: as many as can be copied beside training, as
    ``window=None`` says; ``window=W`` is K = E / W."""

    num_experts: int | None = None
    """E: the experts of a whole layer, if ranks hold different ones. None: this rank's model has all."""

    selection: Literal["turns", "layer", "model"] = "turns"
    """``"turns"``: experts take turns. ``"layer"``: a snapshot has those of each layer with the most tokens
    since they were in one last (MoC-System's load-aware selection). ``"model"``: the same over all layers
    together (as MoEtion). Of ranks that share an expert, its owner selects it, by its own tokens. Experts
    of which other ranks may hold replicas that nobody has declared take turns. The ring has slots for two
    windows then."""

    scope: Literal["both", "weights", "optimizer"] = "both"
    """What a snapshot holds of these experts only. ``"optimizer"``: it holds the weights of all experts,
    and after a failure the others have an older optimizer state. ``"weights"``: it holds the optimizer
    state of all."""

    lost_tokens_limit: float | None = LOST_TOKENS_LIMIT
    """The limit of the proportion of lost tokens (PLT). More experts than K are in each snapshot while a
    failure would exceed the limit if tokens are even: in the first steps of a run, and after failures. None:
    no limit."""

    persist_experts: int | None = None
    """K_persist: of each layer, the experts that a durable checkpoint stores anew; it takes the others from
    earlier ones. At least ``experts``; rounded up to a multiple of it. None: all. The smaller it is, the more
    updates a recovery from storage loses; ``lost_tokens_limit`` holds for it, too."""

    def __post_init__(self) -> None:
        for name, number in (
            ("experts", self.experts),
            ("num_experts", self.num_experts),
            ("persist_experts", self.persist_experts),
        ):
            if number is not None and not _is_count(number, 1):
                raise ValueError(f"{name}={number!r}: pass a number of experts from 1 on, or None")
        if self.experts is not None and self.num_experts is not None and self.experts > self.num_experts:
            raise ValueError(
                f"experts={self.experts}: a layer has num_experts={self.num_experts}; pass at most as many"
            )
        _check_choice("scope", self.scope, *map(str, PartialScope))
        _check_choice("selection", self.selection, *map(str, Selection))
        self._check_durable()
        limit = self.lost_tokens_limit
        if limit is not None and not (_is_number(limit) and 0 <= limit < 1):
            raise ValueError(
                f"lost_tokens_limit={limit!r}: pass a share of the tokens, such as {LOST_TOKENS_LIMIT}, "
                "or None"
            )

    def _check_durable(self) -> None:
        stored = self.persist_experts
        if stored is None:
            return
        if self.selection != "turns":
            raise ValueError(
                f"persist_experts={stored} and selection={self.selection!r}: durable checkpoints store "
                "experts in turn; pass selection='turns', or persist_experts=None"
            )
        if self.num_experts is not None and stored > self.num_experts:
            raise ValueError(
                f"persist_experts={stored}: a layer has num_experts={self.num_experts}; pass at most as many"
            )
        if self.experts is not None and stored < self.experts:
            raise ValueError(
                f"persist_experts={stored}: a checkpoint stores the experts of whole snapshots, and each has "
                f"experts={self.experts} of a layer; pass at least as many, or fewer experts="
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOptions:
    """The content and the cost of snapshots.

    Raises:
        ValueError: a value is unusable, or two exclude each other.
    """

    policy: Literal["sliding", "aligned", "dense", "partial", "selected"] = "sliding"
    """``"sliding"``: sparse snapshots, of which any ``window`` consecutive ones recover.
    ``"aligned"``: windows one after the other, as in MoEvement. ``"dense"``: everything in each.
    ``"partial"``: everything but most of the experts, as in MoC-System. A recovery replays nothing and
    LOSES UPDATES OF EXPERTS (docs/policies.md). ``"selected"``: the same with the experts that have the
    most tokens at risk, as in MoEtion. With the other policies it is exact."""

    window: int | None = None
    """W, 1 to 64: the number of snapshots over which the whole state is spread. None measures the first
    steps and chooses the smallest window whose snapshots fit between the top of the loop and the
    optimizer's step."""

    every: int | Literal["checkfreq", "gemini", "young-daly"] = 1
    """The number of iterations between two snapshots. Above 1 with ``"dense"``, ``"partial"`` and
    ``"selected"`` only. With ``"dense"`` also a rule, by which the interval follows from what snapshots
    cost, and changes while the job runs. ``"checkfreq"``: stalls take ``max_stall`` of the time.
    ``"gemini"``: as often as copies to the host and to peers allow. ``"young-daly"``: the least loss by
    stalls and by failures every ``mtbf_s``."""

    max_stall: float = MAX_STALL
    """For ``every="checkfreq"``: the largest share of the time that snapshots may cost."""

    mtbf_s: float | None = None
    """For ``every="young-daly"``: the mean seconds between two failures of the job."""

    partial: PartialOptions | None = None
    """For ``policy="partial"`` and ``"selected"``: which experts. None: the defaults."""

    ordering: Literal["hard", "soft", "decayed", "capacity"] = "hard"
    """The measure of the popularity of experts; popular ones are anchored last. ``"hard"``: tokens
    that were routed to an expert. ``"soft"``: the gate's probabilities. ``"decayed"``: tokens, older
    ones with less weight. ``"capacity"``: by ``capacities``."""

    capacities: Mapping[str, float] | None = None
    """For ``ordering="capacity"``: a number per expert, by the name of its operator."""

    max_overhead: float = 0.01
    """On CPU, the share of an iteration that copies may take from the trainer's own cores; it decides
    the window."""

    inline_copy: bool | None = None
    """On CPU, copy in the training thread (True) or beside it (False). None: the faster one, by
    measurement."""

    nan_check_every: int = 16
    """Look for NaN in the weights of every n-th snapshot. 0: never."""

    to_peers: Literal["state", "gradients"] = "state"
    """What peers get of a snapshot. ``"gradients"``: those of the last step, from which a peer computes
    weights and optimizer state on its CPU (docs/recompute.md; as in MoEtion): a third of the bytes with
    AdamW. What a peer computes counts only if it has the bits of this process; otherwise it gets the state.
    For parameters on the CPU that AdamW, Adam or SGD of torch.optim update, and snapshots of each iteration
    that hold them whole. Slots become larger by the gradients, which stay in memory until the next step."""

    def __post_init__(self) -> None:
        _check_choice("policy", self.policy, "sliding", "aligned", "dense", "partial", "selected")
        _check_choice("ordering", self.ordering, *(str(each) for each in Ordering))
        window, every = self.window, self.every
        if window is not None and not (_is_count(window, 1) and window <= MAX_WINDOW):
            raise ValueError(f"window={window!r}: a window has 1 to {MAX_WINDOW} snapshots")
        if self.interval_rule is not None:
            self._check_rule(self.interval_rule)
        elif isinstance(every, str):
            raise ValueError(
                f"every={every!r}: pass a number of iterations, or with policy='dense' one of "
                f"{', '.join(repr(str(rule)) for rule in IntervalRule)}"
            )
        elif not _is_count(every, 1):
            raise ValueError(f"every={every!r}: pass a number of iterations, 1 or more")
        elif every != 1 and self.policy in ("sliding", "aligned"):
            raise ValueError(
                f"every={every!r} with policy={self.policy!r}: only policy='dense', 'partial' and 'selected' "
                "take a snapshot every few iterations"
            )
        self._check_partial()
        if not _is_number(self.max_overhead) or not self.max_overhead > 0:
            raise ValueError(
                f"max_overhead={self.max_overhead!r}: pass the share of an iteration, such as 0.01"
            )
        _check_switch("inline_copy", self.inline_copy, "whichever is measured to be faster")
        self._check_to_peers()
        if not _is_count(self.nan_check_every):
            raise ValueError(
                f"nan_check_every={self.nan_check_every!r}: pass a number of snapshots, or 0 for never"
            )

    def _check_rule(self, rule: IntervalRule) -> None:
        if self.policy != "dense":
            raise ValueError(
                f"every={rule!s}: only dense snapshots have an interval by a rule; pass a number"
            )
        if not _is_number(self.max_stall) or not 0 < self.max_stall < 1:
            raise ValueError(f"max_stall={self.max_stall!r}: pass a share of the time, such as {MAX_STALL}")
        mtbf_s = self.mtbf_s
        if rule is IntervalRule.YOUNG_DALY and not (_is_number(mtbf_s) and 0 < (mtbf_s or 0) < math.inf):
            raise ValueError(
                f"mtbf_s={mtbf_s!r}: every='young-daly' needs the seconds between two failures of the job, "
                "such as mtbf_s=3600"
            )

    def _check_to_peers(self) -> None:
        _check_choice("to_peers", self.to_peers, "state", "gradients")
        if self.to_peers == "state":
            return
        if self.every != 1:
            raise ValueError(
                f"to_peers='gradients' and every={self.every!r}: the gradients of one step lead from a "
                "snapshot to the next one only if every iteration has one; pass every=1"
            )
        if self.policy in ("sliding", "aligned") and self.window != 1:
            raise ValueError(
                f"to_peers='gradients' with policy={self.policy!r}: two snapshots in a row hold the same "
                "state whole with policy='dense', 'partial' and 'selected' only, or window=1"
            )

    def _check_partial(self) -> None:
        if self.partial is None:
            return
        if not isinstance(self.partial, PartialOptions):
            raise ValueError(  # noqa: TRY004 - one kind of error for all values
                f"partial={self.partial!r}: pass PartialOptions(...), or None"
            )
        if self.policy not in ("partial", "selected"):
            raise ValueError(
                f"partial= is for policy='partial' and 'selected', and the policy is {self.policy!r}"
            )
        if self.policy == "selected" and self.partial.persist_experts is not None:
            raise ValueError(
                f"persist_experts={self.partial.persist_experts}: it is for policy='partial', where experts "
                "take turns; pass that, or persist_experts=None"
            )
        if self.window is not None and self.partial.experts is not None:
            raise ValueError(
                f"window={self.window} and experts={self.partial.experts}: both say how many experts are in "
                "a snapshot; pass one of them"
            )

    @property
    def dense(self) -> bool:
        return self.policy == "dense"

    @property
    def interval_rule(self) -> IntervalRule | None:
        """The rule by which the interval follows from costs; None: ``every`` is a number."""
        return IntervalRule(str(self.every)) if self.every in (*IntervalRule,) else None

    @property
    def first_every(self) -> int:
        """The interval of the first snapshots."""
        return self.every if isinstance(self.every, int) else 1

    @property
    def asked(self) -> str:
        """The policy in words; a run that resumes with other words changes to it."""
        found = self.of_experts
        if found is None:
            return self.policy
        kind = "partial" if found.selection == "turns" else f"selected (by {found.selection})"
        return kind + (f" ({found.scope})" if found.scope != "both" else "")

    @property
    def of_experts(self) -> PartialOptions | None:
        """The options of partial snapshots; None for other policies."""
        if self.policy not in ("partial", "selected"):
            return None
        found = self.partial or PartialOptions()
        by_risk = self.policy == "selected" and found.selection == "turns"
        return replace(found, selection="model") if by_risk else found

    @property
    def planned(self) -> str:
        """The policy of the plans: of partial snapshots there are several kinds."""
        return "partial" if self.of_experts is not None else self.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """How a run resumes after a failure, and the preparations for it.

    Raises:
        ValueError: a value is unusable.
    """

    resume_at: int | None = None
    """Go back to this iteration, after a loss spike for example; ``saved_iterations`` lists the choices.
    Newer iterations are abandoned. It counts for one start: the next ones that are told the same go on
    from the newest state. The same on all ranks. None: the newest."""

    on_mismatch: Literal["raise", "warn"] = "raise"
    """The reaction to a replayed step that does not reproduce the recording."""

    verify_iterations: int = VERIFY_ITERATIONS
    """The most iterations that a resume replays beyond what it needs, from an earlier snapshot, to compare
    the result with the newest one. 0: no more than it needs, which is none with a window of 1."""

    rehearse: bool = True
    """Load the first snapshots into a copy of the optimizer, and compare its step with the live one.
    This finds state that no snapshot holds (docs/optimizers.md). Once, if memory allows it."""

    freeze: Literal["auto", "drop", "inputs"] = "auto"
    """How operators are frozen in replay: ``"drop"`` discards their gradients, ``"inputs"`` does not
    compute them. ``"auto"``: ``"inputs"`` if that is exact."""

    param_groups: Literal["recorded", "script"] = "recorded"
    """The options of parameter groups (learning rate, …) that count if the script's differ from those
    with which the run began: the ``"recorded"`` ones, or the ``"script"``'s, from the iteration at which
    the state is complete."""

    start_from: str | os.PathLike[str] | None = None
    """A model to begin with if there is nothing to resume from: a folder or file of safetensors with the
    model's own names, or what ``ckptctl import`` prints. Optimizer state is loaded if it has any."""

    park: bool | None = None
    """Reserve memory into which this rank's whole state is copied when the job is torn down
    (docs/parking.md). None: if this run logs boundaries and has several ranks."""

    park_after_s: float | None = None
    """Seconds after which a step that still runs is parked, too. None: much longer than steps have
    lasted so far."""

    in_process: Callable[[], Any] | None = None
    """Restart in this process when another rank has failed, under a host (``python -m ckptd.host``): a
    function that makes the process groups, their wrappers (``DistributedDataParallel``) and every other
    collective call that the script makes before its ``Checkpointer``. It returns the new model if that
    is what ``Checkpointer`` was given, or None. The loop's body must run in ``with ckpt.restartable():``.
    See docs/hosts.md."""

    def __post_init__(self) -> None:
        if self.in_process is not None and not callable(self.in_process):
            raise ValueError(
                f"in_process={self.in_process!r}: pass a function that makes the process groups, or None"
            )
        if self.in_process is not None and self.park:
            raise ValueError(
                "in_process= and park=True: a rank that restarts in its process parks nothing; pass one of "
                "them"
            )
        if self.resume_at is not None and not _is_count(self.resume_at):
            raise ValueError(f"resume_at={self.resume_at!r}: pass the number of an iteration, or None")
        if not isinstance(self.start_from, str | os.PathLike | None):
            raise ValueError(  # noqa: TRY004 - one kind of error for all values
                f"start_from={self.start_from!r}: pass a file, a folder or a URL, or None"
            )
        _check_choice("on_mismatch", self.on_mismatch, "raise", "warn")
        if not _is_count(self.verify_iterations):
            raise ValueError(
                f"verify_iterations={self.verify_iterations!r}: pass how many iterations a resume "
                "may replay to compare, or 0 for none"
            )
        _check_choice("freeze", self.freeze, "auto", "drop", "inputs")
        _check_choice("param_groups", self.param_groups, "recorded", "script")
        if self.rehearse not in (True, False):
            raise ValueError(f"rehearse={self.rehearse!r}: pass True or False")
        _check_switch("park", self.park, "where boundaries are logged")
        if self.park_after_s is not None and not (_is_number(self.park_after_s) and self.park_after_s > 0):
            raise ValueError(f"park_after_s={self.park_after_s!r}: pass seconds above 0, or None")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutOptions:
    """What the structure of model and optimizer does not say by itself.

    ``Checkpointer`` checks whether names and patterns match the model.
    """

    operators: Grouping | None = None
    """The grouping of parameters into operators: a dict from the operator's name to patterns of
    parameter names, or a function of name and tensor that returns the operator's name or None. None:
    experts, gates and dense parts are found in the model."""

    masters: Mapping[str, Tensor] | None = None
    """``{parameter name: fp32 master}`` if the optimizer holds separate master weights. None finds them
    by value."""

    replicated: Mapping[str, Any] | None = None
    """Replicated parameters that no wrapper declares: patterns of parameter names, each with the process
    group (or one-dimensional ``DeviceMesh``) over which matching parameters are replicated."""

    capture_once: bool = True
    """One rank captures each replicated parameter, so that bytes are spread evenly. False: each rank
    captures all of its parameters."""

    attributes: bool = True
    """Capture the attributes that modules of your classes change while they train, such as counters and
    histories. False: only parameters and buffers."""

    def __post_init__(self) -> None:
        operators = self.operators
        if not (operators is None or callable(operators) or isinstance(operators, Mapping)):
            raise ValueError(
                f"operators= is a {type(operators).__name__}; pass a dict from a name to patterns "
                "of parameter names, or a function"
            )
        for what, mapping in (("masters", self.masters), ("replicated", self.replicated)):
            if not (mapping is None or isinstance(mapping, Mapping)):
                raise ValueError(
                    f"{what}= is a {type(mapping).__name__}; pass a dict by parameter names, or None"
                )
        for what, flag in (("capture_once", self.capture_once), ("attributes", self.attributes)):
            if flag not in (True, False):
                raise ValueError(f"{what}={flag!r}: pass True or False")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """Where an ``ElasticJob`` places experts.

    The job checks it on all ranks at once, so that no rank waits for another with an unusable value.
    """

    threshold: int = 2
    """The number of distinct nodes for each expert, as far as there are slots."""

    max_straggler: float | None = 1.1
    """The most load of the busiest rank, as a multiple of the mean. None: survival alone counts."""

    domain: str = ""
    """The node label whose value names a failure domain, such as ``"rack"``. Empty: each node by
    itself."""

    when: TimesConfig | None = None
    """When experts are rebalanced by load while the ranks stay. None: never."""


class OptionGroups(TypedDict, total=False):
    """The option keywords of ``Checkpointer``, for callers that pass them on."""

    run: str | RunOptions | None
    daemon: str | DaemonOptions | None
    snapshots: SnapshotOptions
    recovery: RecoveryOptions
    layout: LayoutOptions


_GROUPS: Mapping[str, type] = {
    "run": RunOptions,
    "daemon": DaemonOptions,
    "snapshots": SnapshotOptions,
    "recovery": RecoveryOptions,
    "layout": LayoutOptions,
    "placement": PlacementOptions,
}
CHECKPOINTER_GROUPS = ("run", "daemon", "snapshots", "recovery", "layout")
# Earlier keywords with a better name now.
_RENAMED = {"options": "param_groups"}
_STORE = (
    "checkpoints in storage are made by the daemon: start it with CKPTD_STORE=s3://bucket/prefix (or "
    "file:///folder), see docs/configuration.md"
)
_STATEFUL = "pass it in state=, such as state={'sched': sched}"
# What people look for in a `Checkpointer` that is elsewhere.
_ELSEWHERE = {
    **dict.fromkeys(("store", "path", "dir", "folder", "save_dir", "checkpoint_dir", "storage"), _STORE),
    **dict.fromkeys(("scheduler", "lr_scheduler", "sched", "scaler"), _STATEFUL),
    "loader": "iterate over ckpt.batches(loader)",
    "dataloader": "iterate over ckpt.batches(loader)",
    "memory": "the daemon has the quota: start it with CKPTD_MEMORY, see docs/configuration.md",
}
# The field that a text stands for if it is passed instead of the group.
_SHORT = {"run": "name", "daemon": "endpoint"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointerOptions:
    """All groups of one ``Checkpointer``."""

    run: RunOptions
    daemon: DaemonOptions
    snapshots: SnapshotOptions
    recovery: RecoveryOptions
    layout: LayoutOptions

    @classmethod
    def of(cls, given: OptionGroups) -> Self:
        """From keywords that passed `check_keywords`; a missing group has its defaults.

        Raises:
            ValueError: a name or an endpoint is unusable.
        """
        return cls(
            run=run_options(given.get("run")),
            daemon=daemon_options(given.get("daemon", "auto")),
            snapshots=given.get("snapshots", SnapshotOptions()),
            recovery=given.get("recovery", RecoveryOptions()),
            layout=given.get("layout", LayoutOptions()),
        )

    def keywords(self) -> OptionGroups:
        """The keywords of ``Checkpointer``."""
        return OptionGroups(
            run=self.run,
            daemon=self.daemon,
            snapshots=self.snapshots,
            recovery=self.recovery,
            layout=self.layout,
        )


def run_options(run: str | RunOptions | None) -> RunOptions:
    """A name alone is the run's."""
    return run if isinstance(run, RunOptions) else RunOptions(name=run)


def daemon_options(daemon: str | DaemonOptions | None) -> DaemonOptions:
    """An endpoint alone; None: off."""
    return daemon if isinstance(daemon, DaemonOptions) else DaemonOptions(endpoint=daemon)


def check_keywords(
    caller: str, given: Mapping[str, Any], groups: Sequence[str] = CHECKPOINTER_GROUPS
) -> None:
    """Refuse keywords that are not ``groups``, and groups of another type.

    Args:
        caller: the callable that got them, for the message.
    Raises:
        TypeError: says how to pass them.
    """
    unknown = {name: value for name, value in given.items() if name not in groups}
    if unknown:
        raise TypeError(_not_a_keyword(caller, unknown, given, groups))
    for name, value in given.items():
        kind = _GROUPS[name]
        texts = (str, type(None)) if name in _SHORT else ()
        if not isinstance(value, (kind, *texts)):
            fields_of = value.items() if isinstance(value, Mapping) else ()
            example = _call(kind, {str(key): each for key, each in fields_of})
            short = {"run": "a name, ", "daemon": "'auto', an endpoint, None, "}.get(name, "")
            raise TypeError(
                f"{caller}: {name}= is a {type(value).__name__}; pass "
                f"{short}{'or ' if short else ''}{example}"
            )


def _not_a_keyword(
    caller: str, unknown: Mapping[str, Any], given: Mapping[str, Any], groups: Sequence[str]
) -> str:
    """The group that has it, with the passed value; if none has, Python's own words, and what is meant."""
    homes = {f.name: name for name in groups for f in fields(_GROUPS[name]) if f.name not in groups}
    moved: dict[str, dict[str, Any]] = {}
    for name, value in unknown.items():
        home = homes.get(_RENAMED.get(name, name))
        if home is None:
            return f"{caller} got an unexpected keyword argument {name!r}{_meant(name, homes)}"
        moved.setdefault(home, {})[name] = value
    texts = []
    for home, values in moved.items():
        shown = {_RENAMED.get(name, name): value for name, value in values.items()}
        if isinstance(given.get(home), str):
            shown = {_SHORT[home]: given[home], **shown}
        names = " and ".join(f"{name}=" for name in values)
        verb = "is" if len(values) == 1 else "are"
        texts.append(f"{names} {verb} now {home}={_call(_GROUPS[home], shown)}")
    return f"{caller}: {'; '.join(texts)} (see {_PAGE})"


def _meant(name: str, homes: Mapping[str, str]) -> str:
    """What a keyword stands for elsewhere, or a field with nearly this name; empty: nothing is known."""
    if name in _ELSEWHERE:
        return f": {_ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, homes, 1, 0.75)
    if not near:
        return ""
    home = homes[near[0]]
    return f"; did you mean {home}={_GROUPS[home].__name__}({near[0]}=...)?"


def _call(kind: type, values: Mapping[str, Any]) -> str:
    return f"{kind.__name__}({', '.join(f'{name}={_shown(value)}' for name, value in values.items())})"


def _shown(value: object) -> str:
    """Tensors, and dicts of them, are not printed."""
    simple = value is None or isinstance(value, str | int | float | bool)
    text = repr(value) if simple else "..."
    return text if len(text) <= _SHOWN_CHARACTERS else "..."


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_choice(name: str, value: object, *allowed: str) -> None:
    if value not in allowed:
        *first, last = (repr(each) for each in allowed)
        raise ValueError(f"{name}={value!r}: choose {', '.join(first)} or {last}")


def _check_switch(name: str, value: object, otherwise: str) -> None:
    if value not in (None, True, False):
        raise ValueError(f"{name}={value!r}: pass True, False, or None ({otherwise})")
