"""Elastic jobs: a world of ranks and experts ends, the next one goes on from what its nodes hold."""

from ckptd.client.worlds.batches import GlobalBatches, share_of
from ckptd.client.worlds.job import ElasticJob

__all__ = ["ElasticJob", "GlobalBatches", "share_of"]
