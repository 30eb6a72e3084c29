"""Tokens held against transformers, without generating there: one forward pass per sequence."""

from __future__ import annotations

import numpy as np
import torch

from worker.sampling.noise import U_MAX, U_SCALE, reference_bits


def first_wrong_greedy_token(
    reference: torch.nn.Module, prompt: list[int], tokens: list[int], tie: float
) -> tuple[int, float] | None:
    """Index of the first of `tokens` that is not the reference's arg-max after all before it, and how much its logit is
    below the best; None if there is no such token.

    A token whose logit is within `tie` of the best counts as right: sums in another order may pick either of the two.
    What follows is judged after the token that was taken, so one tie does not spoil the rest.
    """
    if not tokens:
        return None
    device = next(reference.parameters()).device
    ids = torch.tensor([prompt + tokens], device=device)
    logits = reference(ids).logits[0, len(prompt) - 1 : -1].float()
    short = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
    wrong = torch.nonzero(short > tie)
    return None if not len(wrong) else (int(wrong[0]), float(short[wrong[0]]))


class GreedyJudge:
    """`first_wrong_greedy_token` with a memory, since a grid of settings gives the same tokens again and again.

    `outputs` counts what was judged; `with_ties` those where a token was not the reference's own arg-max but within
    `tie` of it.
    """

    def __init__(self, reference: torch.nn.Module, tie: float) -> None:
        self._reference = reference
        self._tie = tie
        self._exact: dict[tuple[int, ...], bool] = {}
        self.outputs = 0
        self.with_ties = 0

    def check(self, prompt: list[int], tokens: list[int]) -> None:
        """Raises AssertionError if `tokens` are not the reference's greedy tokens after `prompt`."""
        key = (len(prompt), *prompt, *tokens)
        if key not in self._exact:
            with torch.inference_mode():
                wrong = first_wrong_greedy_token(self._reference, prompt, tokens, self._tie)
                assert wrong is None, f"token {wrong[0]} is {wrong[1]} below the best"
                self._exact[key] = first_wrong_greedy_token(self._reference, prompt, tokens, 0.0) is None
        self.outputs += 1
        self.with_ties += not self._exact[key]


def next_probabilities(reference: torch.nn.Module, prompt: list[int], temperature: float) -> np.ndarray:
    """softmax(logits / temperature) of the token after `prompt`, float64[vocabulary]."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0, -1].double()
    return torch.softmax(logits / temperature, -1).numpy()


def score_gap(
    reference: torch.nn.Module, prefix: list[int], temperature: float, seed: int, first: int, second: int
) -> float:
    """How far apart the perturbed scores of two tokens are that could follow `prefix`: logit / T + noise, or the logits
    for T = 0. Says whether two ways of sampling that differ there met a tie."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prefix])).logits[0, -1].double().numpy()
    ids = np.array([first, second])
    if temperature == 0:
        return abs(float(logits[first] - logits[second]))
    uniform = np.minimum((reference_bits(seed, len(prefix), ids) + 0.5) * U_SCALE, U_MAX)
    scores = logits[ids] / temperature - np.log(-np.log1p(-uniform))
    return abs(float(scores[0] - scores[1]))


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The statistic in units of its standard deviation above its mean, small cells pooled."""
    expected = probabilities * counts.sum()
    order = np.argsort(expected)
    pooled = np.searchsorted(np.cumsum(expected[order]), 10) + 1
    groups = [order[:pooled], *order[pooled:, None]]
    observed = np.array([counts[g].sum() for g in groups])
    wanted = np.array([expected[g].sum() for g in groups])
    groups_seen = wanted > 0
    assert counts[probabilities == 0].sum() == 0
    statistic = ((observed - wanted)[groups_seen] ** 2 / wanted[groups_seen]).sum()
    freedom = groups_seen.sum() - 1
    return (statistic - freedom) / np.sqrt(2 * max(freedom, 1))
