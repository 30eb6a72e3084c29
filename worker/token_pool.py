"""`TokenPool`: the token ids of every running row, on the rank's device."""

from __future__ import annotations

import torch


class TokenPool:
    """int32[num_rows + 1, width] of token ids; the last row is the dummy row.

    Prompt tokens arrive in the plan, sampled ones are scattered here by the sampler, so the next step gathers its
    input without a trip to the host. One column more than the page table's positions: the token sampled after the
    last valid position has a place to go.
    """

    def __init__(self, num_rows: int, max_seq_len: int, page_size: int, device: torch.device | str) -> None:
        width = -(-max_seq_len // page_size) * page_size + 1
        self.tokens = torch.zeros((num_rows + 1, width), dtype=torch.int32, device=device)

    def write_runs(self, runs: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write a plan's token runs: int32[n, 3] of (row, first position, count) and their ids, run after run."""
        if self.tokens.is_cuda:
            from worker.kernels.plan_sections import write_token_runs  # triton comes with torch for CUDA only

            write_token_runs(runs, tokens, self.tokens)
            return
        row, first, count = runs.long().unbind(1)
        total = len(tokens)
        run = torch.repeat_interleave(torch.arange(len(runs), device=runs.device), count, output_size=total)
        offset = torch.arange(total, device=runs.device) - (count.cumsum(0) - count)[run]
        self.tokens[row[run], first[run] + offset] = tokens

    def gather(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids at int64 (rows, positions): int64."""
        return self.tokens[rows, positions].long()

    def scatter(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store int32 `tokens` at int64 (rows, positions), and 0 for what is no token: the next step reads them."""
        if self.tokens.is_cuda:
            from worker.kernels.token_pool import scatter_tokens

            scatter_tokens(self.tokens, rows, positions, tokens)
        else:
            self.tokens[rows, positions] = tokens.clamp(min=0)

    def decode_inputs(
        self, rows: torch.Tensor, cached_len: torch.Tensor, out_loc: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and slots of decode entries, int64[B] each; arguments int32[B], as in a plan."""
        if self.tokens.is_cuda:
            from worker.kernels.token_pool import decode_inputs

            return decode_inputs(self.tokens, rows, cached_len, out_loc)
        positions = cached_len.long()
        return self.gather(rows.long(), positions), positions, out_loc.long()
