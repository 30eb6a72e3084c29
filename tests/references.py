"""Greedy tokens held against transformers, without generating there: one forward pass per sequence."""

from __future__ import annotations

import torch


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
    ids = torch.tensor([prompt + tokens])
    logits = reference(ids).logits[0, len(prompt) - 1 : -1].float()
    short = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    wrong = torch.nonzero(short > tie)
    return None if not len(wrong) else (int(wrong[0]), float(short[wrong[0]]))
