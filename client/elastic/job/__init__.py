"""Elastic jobs: an incarnation of ranks and experts ends, and the next one continues from its state."""

from ckptd.client.elastic.job.elastic_job import ElasticJob
from ckptd.client.elastic.job.global_batch import GlobalBatches, share_of
from ckptd.client.options import PlacementOptions

__all__ = ["ElasticJob", "GlobalBatches", "PlacementOptions", "share_of"]
