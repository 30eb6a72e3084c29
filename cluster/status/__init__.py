"""`raydix status`: what is served on a cluster, by which ranks on which nodes, and how fast."""

from cluster.status.collect import ApplicationStatus, ReplicaStatus, collect, rate

__all__ = ["ApplicationStatus", "ReplicaStatus", "collect", "rate"]
