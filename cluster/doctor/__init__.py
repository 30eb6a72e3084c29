"""`raydix doctor`: whether a cluster is fit to serve, before anything is served on it."""

from cluster.doctor.examine import examine
from cluster.doctor.findings import Finding, Level

__all__ = ["Finding", "Level", "examine"]
