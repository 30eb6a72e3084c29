"""The dashboard asks for metrics that /metrics has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from cluster.histogram import Histogram
from cluster.serve.metrics import PREFIX, IngressMetrics, ModelMetrics, render

DASHBOARD = Path(__file__).parents[2] / "ray_configs/grafana/raydix.json"


class AnyEngine(defaultdict):
    """Every counter and histogram that an engine may be asked for."""

    def __missing__(self, key: str) -> Any:
        return Histogram((0.1, 1.0)).snapshot() if key.endswith("_seconds") else 1


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    ingress = IngressMetrics()
    ingress.ended(1.0, "stop")
    lines = render([ModelMetrics("model", {"i": ingress.snapshot()}, {"r": AnyEngine()})]).decode().splitlines()
    there = {re.match(r"\w+", line)[0] for line in lines if line.startswith(PREFIX)}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(rf"{PREFIX}\w+", query)}
    assert len(queries) > 20
    assert asked <= there, asked - there


def test_panels_do_not_overlap() -> None:
    taken = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, panel["title"]
            taken.add(cell)
