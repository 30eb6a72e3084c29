"""top-k, top-p, min-p over shards against a plain full sort: the same tokens stay, whatever the split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from thread_group import ThreadGroup, run_ranks

from worker.sampling.filters import OrderKeys, cut_list, search_threshold

torch.set_num_threads(1)


def reference_kept(values: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Sort everything by (value descending, id ascending); cut by top-k, top-p of what is left, then min-p."""
    order = np.lexsort((np.arange(len(values)), -values))[:top_k]
    mass = np.exp(values[order].astype(np.float64) - values.max())
    before = np.cumsum(mass) - mass
    keep = before < np.float32(top_p) * mass.sum() if top_p < 1 else np.ones(len(order), bool)
    keep &= values[order] >= values.max() + np.log(np.float32(min_p)) if min_p > 0 else True
    keep[0] = True
    return set(order[keep].tolist())


def kept(values: np.ndarray, params: list[tuple[int, float, float]], tp_size: int, list_size: int, search: bool):
    """The ids that pass on row i with params[i], and which rows the candidate list answers alone."""
    vocab = values.shape[1]
    order = OrderKeys(vocab)
    top_k = torch.tensor([k or vocab for k, _, _ in params])
    top_p, min_p = (torch.tensor([p[i] for p in params], dtype=torch.float32) for i in (1, 2))

    def work(tp: ThreadGroup):
        share = slice(vocab // tp.size * tp.rank, vocab // tp.size * (tp.rank + 1))
        local = torch.from_numpy(values[:, share])
        ids = torch.arange(share.start, share.stop, dtype=torch.int32)
        keys = order.encode(local, ids)
        cut = cut_list(keys, local, top_k, top_p, min_p, list_size, vocab, order, tp)
        if not search:
            names = order.ids(cut.keys)
            return [set(n[k].tolist()) for n, k in zip(names, cut.keep, strict=True)], cut.complete.tolist()
        threshold = search_threshold(keys, local, cut, top_k, top_p, min_p, True, order, tp)
        return [set(ids[row].tolist()) for row in keys >= threshold[:, None]], None

    results = run_ranks(tp_size, work)
    if not search:
        assert all(result == results[0] for result in results)  # every rank makes the same cut
        return results[0]
    return [set().union(*(r[0][row] for r in results)) for row in range(len(params))], None


PARAMS = [
    (k, p, m)
    for k in (0, 1, 5, 40, 300)
    for p in (1.0, 0.95, 0.6, 0.01)
    for m in (0.0, 0.05)
]  # fmt: skip


def logits(kind: str, rows: int, vocab: int) -> np.ndarray:
    rng = np.random.default_rng(17)
    values = rng.normal(0, {"flat": 0.3, "peaked": 4.0, "ties": 1.0, "padded": 2.0}[kind], (rows, vocab))
    if kind == "ties":
        values = np.round(values * 2) / 2  # a dozen distinct values, and both zeros
    if kind == "padded":
        values[:, -vocab // 4 :] = -np.inf
    return values.astype(np.float32)


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "padded"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_same_tokens_stay_as_after_a_full_sort(kind: str, tp_size: int) -> None:
    values = logits(kind, len(PARAMS), 1200)
    expected = [reference_kept(v, k or 1200, p, m) for v, (k, p, m) in zip(values, PARAMS, strict=True)]
    # A padded id is never sampled; whether an unfiltered row formally keeps it makes no difference.
    real = [set(np.flatnonzero(v > -np.inf).tolist()) for v in values]
    listed, complete = kept(values, PARAMS, tp_size, 64, search=False)
    searched, _ = kept(values, PARAMS, tp_size, 64, search=True)
    for row, want in enumerate(expected):
        assert searched[row] & real[row] == want & real[row], PARAMS[row]
        if complete[row]:
            assert listed[row] == want, PARAMS[row]
        else:
            assert PARAMS[row][0] == 0 or PARAMS[row][0] > 64
    assert any(complete) and not all(complete)


def test_order_keys_sort_by_value_then_id() -> None:
    order = OrderKeys(151_936)
    values = torch.tensor([3.5, -0.0, 0.0, -torch.inf, torch.inf, -7.25, 0.0, 1e-38])
    ids = torch.tensor([9, 151_935, 0, 4, 5, 6, 7, 8], dtype=torch.int32)
    keys = order.encode(values, ids)
    assert torch.equal(order.ids(keys), ids)
    assert torch.equal(order.values(keys), values + 0.0)
    assert ids[keys.argsort(descending=True)].tolist() == [5, 9, 8, 0, 7, 151_935, 6, 4]
    assert bool((order.floor(values) <= keys).all())


def test_the_whole_vocabulary_fits_the_list() -> None:
    values = logits("flat", 2, 48)
    got, complete = kept(values, [(0, 0.9, 0.0), (30, 0.9, 0.0)], 2, 64, search=False)
    assert complete == [True, True]
    assert got == [reference_kept(values[0], 48, 0.9, 0.0), reference_kept(values[1], 30, 0.9, 0.0)]
