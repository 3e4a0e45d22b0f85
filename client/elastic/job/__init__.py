"""Elastic jobs: a world of ranks and experts ends, the next one goes on from what its nodes hold."""

from ckptd.client.elastic.job.elastic_job import ElasticJob
from ckptd.client.elastic.job.global_batch import GlobalBatches, share_of
from ckptd.client.options import PlacementOptions

__all__ = ["ElasticJob", "GlobalBatches", "PlacementOptions", "share_of"]
