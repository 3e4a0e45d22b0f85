"""The words that trainer, daemon and `ckptctl` exchange: closed, typed, validated on both sides.

Every message is a frozen tagged struct. A `Request` is answered by exactly one `Reply`, or by
`Refused`; a `OneWay` is answered only if it cannot be served, and then by `Refused`. Control
messages carry descriptions (a path, a slot number), never tensor bytes.

They are defined by who talks to whom (`common_messages`, `trainer_messages`, `ctl_messages`, made
of `message_parts`; `elastic_messages` by what about) and are imported from here by everybody.

`PROTOCOL_VERSION` grows when the meaning or the shape of any message changes. It travels in the
envelope (`ckptd.transport.control.wire`), so that a peer of another version is refused by name and not
by a parse error.
"""

from __future__ import annotations

from ckptd.transport.control.common_messages import (
    Done,
    GetHoldings,
    Hello,
    Ping,
    Pong,
    Refused,
    RunSeen,
    SeeRun,
    Welcome,
)
from ckptd.transport.control.ctl_messages import (
    AdmitNodes,
    Drill,
    DrillReport,
    DurableRank,
    DurableStatus,
    EventInfo,
    Events,
    Forget,
    GetEvents,
    GetPeers,
    GetSnapshots,
    GetStatus,
    HostedReplica,
    Park,
    Parks,
    Peers,
    PeerStatus,
    RankParked,
    RankSnapshots,
    ReplicationStatus,
    RunFailures,
    SegmentStatus,
    SessionStatus,
    SlotInfo,
    Snapshots,
    Status,
    StepAside,
    TargetStatus,
    Unquarantine,
)
from ckptd.transport.control.elastic_messages import (
    BringStored,
    Brought,
    DurableWorld,
    DurableWorlds,
    Elastic,
    ElasticNode,
    ElasticTold,
    ElasticWhen,
    GetDurableWorlds,
    GetElastic,
    SeenElastic,
    TellElastic,
)
from ckptd.transport.control.message_parts import (
    Blob,
    Count,
    Generation,
    HeaderBytes,
    HeldSegment,
    HeldSlot,
    Holdings,
    Iteration,
    Labels,
    Member,
    Metrics,
    Name,
    NodeCard,
    NumSlots,
    Rank,
    RankMismatch,
    RefusalCode,
    ReplayFailure,
    RunRecord,
    SegmentInfo,
    ShortText,
    SlotIndex,
    Text,
)
from ckptd.transport.control.trainer_messages import (
    Attach,
    Attached,
    Detach,
    Drop,
    Fetch,
    FetchPiece,
    FetchSource,
    FetchState,
    Filled,
    GetFetch,
    Join,
    Notice,
    ParkOutcome,
    Report,
    Reserve,
    ReserveBeside,
    Reserved,
    TellReplay,
)

__all__ = [
    "PROTOCOL_VERSION",
    "AdmitNodes",
    "Attach",
    "Attached",
    "Blob",
    "BringStored",
    "Brought",
    "Count",
    "Detach",
    "Done",
    "Drill",
    "DrillReport",
    "Drop",
    "DurableRank",
    "DurableStatus",
    "DurableWorld",
    "DurableWorlds",
    "Elastic",
    "ElasticNode",
    "ElasticTold",
    "ElasticWhen",
    "EventInfo",
    "Events",
    "Fetch",
    "FetchPiece",
    "FetchSource",
    "FetchState",
    "Filled",
    "Forget",
    "Generation",
    "GetDurableWorlds",
    "GetElastic",
    "GetEvents",
    "GetFetch",
    "GetHoldings",
    "GetPeers",
    "GetSnapshots",
    "GetStatus",
    "HeaderBytes",
    "HeldSegment",
    "HeldSlot",
    "Hello",
    "Holdings",
    "HostedReplica",
    "Iteration",
    "Join",
    "Labels",
    "Member",
    "Message",
    "Metrics",
    "Name",
    "NodeCard",
    "Notice",
    "NumSlots",
    "OneWay",
    "Park",
    "ParkOutcome",
    "Parks",
    "PeerStatus",
    "Peers",
    "Ping",
    "Pong",
    "Rank",
    "RankMismatch",
    "RankParked",
    "RankSnapshots",
    "RefusalCode",
    "Refused",
    "ReplayFailure",
    "ReplicationStatus",
    "Reply",
    "Report",
    "Request",
    "Reserve",
    "ReserveBeside",
    "Reserved",
    "RunFailures",
    "RunRecord",
    "RunSeen",
    "SeeRun",
    "SeenElastic",
    "SegmentInfo",
    "SegmentStatus",
    "SessionStatus",
    "ShortText",
    "SlotIndex",
    "SlotInfo",
    "Snapshots",
    "Status",
    "StepAside",
    "TargetStatus",
    "TellElastic",
    "TellReplay",
    "Text",
    "Unquarantine",
    "Welcome",
]

PROTOCOL_VERSION = 3

Request = (
    Hello
    | Attach
    | Reserve
    | ReserveBeside
    | Drop
    | Detach
    | Ping
    | SeeRun
    | GetPeers
    | Drill
    | Join
    | Fetch
    | GetFetch
    | GetStatus
    | GetSnapshots
    | GetEvents
    | GetElastic
    | GetDurableWorlds
    | BringStored
    | Park
    | AdmitNodes
    | Forget
    | TellReplay
    | StepAside
    | Unquarantine
)
OneWay = Filled | Report | Notice | ParkOutcome | TellElastic
Reply = (
    Welcome
    | Attached
    | Reserved
    | Done
    | Pong
    | Refused
    | RunSeen
    | Peers
    | DrillReport
    | FetchState
    | Status
    | Snapshots
    | Parks
    | Events
    | SeenElastic
    | DurableWorlds
    | Brought
)
Message = Request | OneWay | Reply
