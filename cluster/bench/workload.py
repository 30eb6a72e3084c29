"""Requests for benchmarks, the same on every machine."""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_TOKEN_ID = 10_000  # inclusive; ids of plain text in every vocabulary in use


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and how many tokens to generate for each (EOS ignored)."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)


def uniform(num_seqs: int, min_len: int, max_len: int, seed: int, vocab_size: int, run: int = 0) -> Workload:
    """Prompt and output lengths uniform in `min_len..max_len`, random token ids.

    256 sequences of 100..1024 with seed 0 are the workload of DESIGN section 10: 133,966 output tokens. Runs of one
    seed have the same lengths and other ids, so no run finds another's prompts in the prefix cache.
    """
    top = min(MAX_TOKEN_ID, vocab_size - 1)
    rng = random.Random(seed)
    prompts = [[rng.randint(0, top) for _ in range(rng.randint(min_len, max_len))] for _ in range(num_seqs)]
    output_lens = [rng.randint(min_len, max_len) for _ in range(num_seqs)]
    return Workload([[(id + run) % (top + 1) for id in prompt] for prompt in prompts], output_lens)
