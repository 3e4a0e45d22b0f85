"""Mixture layers whose experts have different numbers of replicas on different ranks: ``ElasticExperts``.

What is decided, the pure planners in ``ckptd.elastic`` decide; here it is done, with ``torch.distributed``.
"""

from ckptd.client.elastic.layer import ElasticExperts

__all__ = ["ElasticExperts"]
