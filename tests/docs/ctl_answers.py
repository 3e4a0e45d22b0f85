"""The answers of `ckptctl --json` as types, and what is made of them: a JSON Schema and the page that shows it.

``python -m tests.docs.ctl_answers`` writes docs/reference/ckptctl.schema.json and the listing in
docs/reference/ckptctl_json.md anew. What they promise users: keys stay, with their types; new ones may come.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NotRequired, TypedDict, is_typeddict

import msgspec

from ckptd.core.advice.outlook import Choice, StorageOutlook
from ckptd.core.recovery.whatif import RankOutcome
from ckptd.ctl.audit.audit_run import Audited
from ckptd.ctl.doctor import Grade
from ckptd.ctl.elastic_answers import PlacementMove
from ckptd.ctl.stores.store_changes import Collected, Pinned, Removed
from ckptd.ctl.stores.store_checks import Checked
from ckptd.ctl.stores.store_lookup import CheckpointShown, RunShown
from ckptd.dash.dash_view import DashView
from ckptd.export.exports import ExportReport
from ckptd.export.importing import ImportReport
from ckptd.saved import SavedIteration
from ckptd.transport import messages as m
from tests.docs.code_blocks import ROOT

__all__ = ["ANSWERS", "schema", "strict"]

SCHEMA = ROOT / "docs/reference/ckptctl.schema.json"
PAGE = ROOT / "docs/reference/ckptctl_json.md"
_BEGIN, _END = "<!-- answers -->\n", "<!-- end of answers -->"


class Error(TypedDict):
    """Any command that fails."""

    error: str
    exit_status: int


class Together(TypedDict):
    """The global recovery."""

    reason: str


class Localized(TypedDict):
    """The localized recovery, of a job with boundary logs."""

    reason: str
    resume: NotRequired[int]
    together: NotRequired[int]


class Prediction(TypedDict):
    """A recovery after the loss of nodes. ``start``, ``end`` and ``needed`` belong to the global one."""

    lost_nodes: list[str]
    recoverable: bool
    recovery: Literal["localized", "together", "none"]
    reason: str
    ranks: list[RankOutcome]
    together: Together
    start: NotRequired[int]
    end: NotRequired[int]
    needed: NotRequired[int]
    localized: NotRequired[Localized]


class Check(TypedDict):
    """One check of `doctor`; ``fix`` is empty if nothing needs fixing."""

    name: str
    grade: Grade
    detail: str
    fix: str


class Waited(TypedDict):
    """The endpoint of the daemon that answers."""

    endpoint: str


class Page(TypedDict):
    """The address of the page."""

    url: str


class Completion(TypedDict):
    """A completion script."""

    shell: str
    script: str


class SupportFile(TypedDict):
    """What was packed."""

    file: str
    size_bytes: int
    members: list[str]


class LogLines(TypedDict):
    """The end of the log, and where it is."""

    log: str
    lines: list[str]


class Stopped(TypedDict):
    """The process that was asked to end, and whether it has (only with ``--wait``)."""

    pid: int
    ended: bool


class OwnKey(TypedDict):
    """This node's public key."""

    keys_dir: str
    public_key: str


class NodeKey(TypedDict):
    """The key of another node."""

    keys_dir: str
    node: str
    public_key: str


class Untrusted(TypedDict):
    """A node whose key is no longer trusted."""

    keys_dir: str
    node: str


class OwnSigner(TypedDict):
    """The public key with which this node signs manifests."""

    keys_dir: str
    signer: str


class NodeSigner(TypedDict):
    """That of another node."""

    keys_dir: str
    node: str
    signer: str


class ListedKey(TypedDict):
    """A trusted key; ``expires_s`` is unix time, or null: never. ``previous``: replaced, and accepted for a while."""

    node: str
    public_key: str
    expires_s: float | None
    previous: bool


class KeyList(TypedDict):
    """All keys of this node."""

    keys_dir: str
    public_key: str
    trusted: dict[str, str]
    keys: list[ListedKey]


class RatedPolicy(TypedDict):
    """The costs of a policy: [policies](../policies.md)."""

    name: str
    choice: Choice
    snapshot_bytes: int
    mean_bytes: float
    stall_s: float
    lag_s: float
    lost_s: float
    load_s: float
    replay_s: float
    restart_s: float
    memory_bytes: int
    replication_Bps: float
    behind: bool
    ettr: float
    older_iterations: float
    lost_share: float
    localized: bool
    storage: StorageOutlook | None
    recovery_s: float
    loss_s: float
    played_ettr: float
    played_lost_share: float


class Advice(TypedDict):
    """What to take; ``arguments`` is what to pass to `Checkpointer`, ``settings`` what to set for daemons."""

    iteration_s: float
    mtbf_s: float
    rank_state_bytes: int
    assumed: str
    arguments: str
    settings: dict[str, int]
    rejected: str
    lossy_rejected: str
    policies: list[RatedPolicy]


class Chance(TypedDict):
    """The probability that every expert survives the loss of so many nodes; ``error`` is the standard error."""

    lost: int
    probability: float
    error: float
    exact: bool


class Placement(TypedDict):
    """A placement: by layer and node its experts, with one entry for each replica."""

    placement: list[list[list[int]]]
    recovery: list[Chance]
    domain_recovery: list[Chance]
    straggler: float
    straggler_by_layer: list[float]
    tokens_per_rank: list[list[float]]


class PlannedPlacement(Placement):
    """A planned one, and the transfers that lead to it; null: the present one is not known."""

    nodes: list[str]
    layers: list[str]
    method: str
    guarantee: str
    move: PlacementMove | None


class PlannedOrError(PlannedPlacement, total=False):
    """A planned placement, or only ``error``: the reason why there is none."""

    error: str


class NextOrError(TypedDict, total=False):
    """When a rebalance would pay, or only ``error``: the reason why there is none."""

    check_step: int
    due_step: int
    straggler_now: float
    straggler_after: float
    cost_s: float
    gain_s: float
    worth_from_s: float
    pays: bool | None
    error: str


class SnapshotPrediction(Prediction):
    """A recovery from snapshots; only ``recoverable`` and ``reason`` if the daemon refuses to answer."""


class ElasticRun(TypedDict):
    """The placement of a job; ``told`` is its report."""

    job: str
    run: str
    rank: int
    ago_s: float
    told: dict[str, Any]
    now: NotRequired[Placement]
    history: NotRequired[list[float]]
    next: NotRequired[NextOrError]


class ElasticRuns(TypedDict):
    """The placements that were reported to this daemon."""

    runs: list[ElasticRun]


class ElasticLoss(TypedDict):
    """The experts that are lost with nodes (layer and expert), and the placement on the others; ``recoverable`` is
    null if only a running job's daemon knows."""

    lost_nodes: list[str]
    lost_experts: list[tuple[int, int]]
    planned: PlannedOrError
    snapshots: NotRequired[SnapshotPrediction]
    recoverable: bool | None


class StoreRuns(TypedDict):
    """The runs of a store."""

    store: str
    runs: list[RunShown]


class Collections(TypedDict):
    """What was deleted, or would be."""

    dry_run: bool
    runs: list[Collected]


# Those of which an answer has a part.
_ANY_KEYS = {"PlannedOrError", "NextOrError", "SnapshotPrediction"}
# The document of each command.
ANSWERS: dict[str, Any] = {
    "status": m.Status,
    "snapshots": m.Snapshots,
    "iterations": list[SavedIteration],
    "events": m.Events,
    "top": DashView,
    "dash": Page,
    "park": m.Parks,
    "doctor": list[Check],
    "admit": m.Done,
    "forget": m.Done,
    "unquarantine": m.Done,
    "export": ExportReport,
    "import": ImportReport,
    "peers": m.Peers,
    "audit": Audited,
    "whatif": Prediction,
    "drill": m.DrillReport,
    "elastic plan": PlannedPlacement,
    "elastic show": ElasticRuns,
    "elastic whatif": ElasticLoss,
    "keys new": OwnKey,
    "keys trust": NodeKey,
    "keys untrust": Untrusted,
    "keys rotate": OwnKey,
    "keys new-signer": OwnSigner,
    "keys trust-signer": NodeSigner,
    "keys list": KeyList,
    "advise": Advice,
    "checkpoints list": StoreRuns,
    "checkpoints show": CheckpointShown,
    "checkpoints verify": Checked,
    "checkpoints pin": Pinned,
    "checkpoints unpin": Pinned,
    "checkpoints rm": Removed,
    "checkpoints gc": Collections,
    "verify": Checked,
    "stop": Stopped,
    "logs": LogLines,
    "support": SupportFile,
    "wait": Waited,
    "completion": Completion | list[str],
}


def schema() -> dict[str, Any]:
    """JSON Schema of every answer (``properties`` by command) and of an error."""
    kinds = [*ANSWERS.values(), Error]
    found, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    dicts = {kind.__name__ for kind in globals().values() if is_typeddict(kind)}
    for name, part in parts.items():
        _simplify(part)
        if name in _ANY_KEYS:
            part["required"] = []
        elif "properties" in part and name not in dicts:  # keys with a default are written, too
            part["required"] = list(part["properties"])
    answers = [_simplify(each) for each in found]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Answers of ckptctl --json, by command",
        "type": "object",
        "properties": dict(zip([*ANSWERS, "error"], answers, strict=True)),
        "$defs": dict(sorted(parts.items())),
    }


def _simplify(part: Any) -> Any:
    """Without titles and defaults; docstrings shortened to their first sentence."""
    if isinstance(part, dict):
        part.pop("title", None)
        part.pop("default", None)
        if isinstance(part.get("description"), str):
            part["description"] = " ".join(re.split(r"\n\s*\n", part["description"])[0].split())
        for key, each in part.items():
            if key == "properties":
                for inner in each.values():
                    _simplify(inner)
            else:
                _simplify(each)
    elif isinstance(part, list):
        for each in part:
            _simplify(each)
    return part


def strict(document: dict[str, Any]) -> dict[str, Any]:
    """A copy that accepts no key that is not listed."""
    copy = json.loads(json.dumps(document))
    for part in copy["$defs"].values():
        if "properties" in part:
            part["additionalProperties"] = False
    found: dict[str, Any] = copy
    return found


# -- the page -------------------------------------------------------------------------------------


def listing(document: dict[str, Any]) -> str:
    """A table of commands, then each type with its keys."""
    lines = ["| command | document |", "|---|---|"]
    for command, answer in document["properties"].items():
        name = "any, if it fails" if command == "error" else f"`{command}`"
        lines.append(f"| {name} | {_shown(answer)} |")
    for name, part in document["$defs"].items():
        lines += ["", f"### {name}", ""]
        if part.get("description"):
            lines += [part["description"].replace("``", "`"), ""]
        if "properties" in part:
            lines += ["| key | type |", "|---|---|"]
            needed = set(part["required"])
            for key, each in part["properties"].items():
                lines.append(f"| `{key}`{'' if key in needed else ' (may be absent)'} | {_shown(each)} |")
        else:
            lines.append(f"{_shown(part)}.")
    return "\n".join(lines)


def _shown(part: dict[str, Any]) -> str:
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in part:
        return " or ".join(_shown(each) for each in part["anyOf"])
    if "enum" in part:
        return " or ".join(f"`{json.dumps(each)}`" for each in part["enum"])
    if part.get("type") == "array":
        if "prefixItems" in part:
            return f"[{', '.join(_shown(each) for each in part['prefixItems'])}]"
        return f"list of {_shown(part['items'])}"
    if part.get("type") == "object":
        inner = part.get("additionalProperties")
        return f"object of {_shown(inner)}" if isinstance(inner, dict) and inner else "object"
    return str(part.get("type", "any"))


def written(document: dict[str, Any]) -> tuple[str, str]:
    """The contents of the schema's file and of the page."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, mark, tail = rest.partition(_END)
    assert mark, f"{PAGE} has no place for the answers"
    return json.dumps(document, indent=1) + "\n", f"{head}{_BEGIN}{listing(document)}\n{_END}{tail}"


if __name__ == "__main__":
    texts = written(schema())
    SCHEMA.write_text(texts[0], encoding="utf-8")
    PAGE.write_text(texts[1], encoding="utf-8")
