"""Mixture layers whose experts have different numbers of replicas on different ranks: ``ElasticExperts``.

The pure planners in ``ckptd.core.elastic`` decide; these modules act, with ``torch.distributed``.
An optimizer on each replica and ``sync_gradients()`` is one strategy (Lazarus), ``ExpertShards``
the other (SwiftMoE).
"""

from ckptd.client.elastic.layer.elastic_layer import ElasticExperts
from ckptd.client.elastic.layer.model_surgery import (
    HandWritten,
    elastic_layers,
    full_state_dict,
    load_full_state_dict,
    replace_moe_blocks,
)
from ckptd.client.elastic.sharded_optimizer import ExpertShards, recut

__all__ = [
    "ElasticExperts",
    "ExpertShards",
    "HandWritten",
    "elastic_layers",
    "full_state_dict",
    "load_full_state_dict",
    "recut",
    "replace_moe_blocks",
]
