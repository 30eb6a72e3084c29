"""The page for people at /dashboard: static files, and the state they show."""

from cluster.serve.dashboard.collector import Collector, ingress_facts
from cluster.serve.dashboard.page import page_file

__all__ = ["Collector", "ingress_facts", "page_file"]
