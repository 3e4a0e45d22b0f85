"""Mixture layers whose experts have different numbers of replicas on different ranks: ``ElasticExperts``.

What is decided, the pure planners in ``ckptd.elastic`` decide; here it is done, with ``torch.distributed``.
"""

from ckptd.client.elastic.blocks import HandWritten, elastic_layers, replace_moe_blocks
from ckptd.client.elastic.full_state import full_state_dict, load_full_state_dict
from ckptd.client.elastic.layer import ElasticExperts

__all__ = [
    "ElasticExperts",
    "HandWritten",
    "elastic_layers",
    "full_state_dict",
    "load_full_state_dict",
    "replace_moe_blocks",
]
