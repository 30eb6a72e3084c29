"""`raydix bench serving-path`: both paths deliver every token, and their processes are told apart."""

from __future__ import annotations

import pytest

from cluster.bench.serve.paths import OURS, USUAL, compare_paths
from cluster.config import EngineConfig
from cluster.progress import no_progress


@pytest.mark.full_grid
def test_both_paths(private_ray):
    config = EngineConfig(device="fake", max_running_requests=8, max_seq_len=256, integrity_interval=1)
    result = compare_paths(config, [3], 8, 1, no_progress)
    ours, usual = result["rows"]
    assert (ours["path"], usual["path"]) == (OURS, USUAL)
    for row in (ours, usual):
        assert (row["streams"], row["requests"]) == (3, 4)
        assert row["tokens_per_s"] > 0 and row["itl_p50_ms"] <= row["itl_p99_ms"]
    assert usual["tokens_per_chunk"] == 1
