"""Ours next to `transformers.generate`: same model, dtype and threads, prompts of unequal lengths, greedy.

transformers gets what a careful user would give it: left padding, one call per batch, its default KV cache. Both
generate the same number of tokens for every prompt (EOS ignored). Runs of both alternate, so that what else happens
on the machine hits both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.bench.workload import Workload, uniform
from cluster.config import EngineConfig
from cluster.progress import Progress

MIN_PROMPT, MAX_PROMPT = 16, 128


def compare(
    config: EngineConfig, batch_sizes: list[int], output_len: int, seed: int, repeats: int, threads: int,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Medians of output tokens per second at each batch size, ours and theirs.

    `threads` is transformers' thread count. Ours uses one thread per rank on a CPU, so give it `tp_size` for a fair
    comparison.
    """
    import torch

    from cluster import LLM

    torch.set_num_threads(threads)
    rows = []
    with LLM(**config.model_dump(exclude_unset=True), progress=progress) as llm:
        dtype = llm.config.dtype
        theirs = Transformers(Path(llm.info.model_path), dtype, llm.config.device)
        for size in batch_sizes:
            ours_times, theirs_times, equal = [], [], 0
            for run in range(repeats + 1):
                progress(f"batch {size}, run {run} of {repeats}", 0.0)
                load = uniform(size, MIN_PROMPT, MAX_PROMPT, seed, llm.info.vocab_size, run)
                load = Workload(load.prompts, [output_len] * size)
                our_ids, our_seconds = timed(lambda load=load: ours(llm, load))
                their_ids, their_seconds = timed(lambda load=load: theirs.generate(load.prompts, output_len))
                if run == 0:
                    continue  # warms up both
                ours_times.append(our_seconds)
                theirs_times.append(their_seconds)
                equal += sum(a == b for a, b in zip(our_ids, their_ids, strict=True))
            tokens = size * output_len
            our_rate, their_rate = tokens / statistics.median(ours_times), tokens / statistics.median(theirs_times)
            rows.append(
                {
                    "batch": size,
                    "raydix_tok_s": our_rate,
                    "transformers_tok_s": their_rate,
                    "ratio": our_rate / their_rate,
                    "equal_sequences": f"{equal}/{size * repeats}",
                }
            )
        effective = llm.config.model_dump(mode="json")
    return {"rows": rows, "output_len": output_len, "repeats": repeats, "threads": threads, "config": effective}


def timed(work: Callable[[], list[list[int]]]) -> tuple[list[list[int]], float]:
    """The token ids and the seconds it took."""
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def ours(llm: Any, load: Workload) -> list[list[int]]:
    """Greedy token ids of each prompt from our engine."""
    from scheduler.sampling_params import SamplingParams

    sampling = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in load.output_lens]
    return [list(map(int, output.token_ids)) for output in llm.generate(load.prompts, sampling)]


class Transformers:
    """The same checkpoint in transformers."""

    def __init__(self, path: Path, dtype: str, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        """Greedy token ids of each prompt, `output_len` each."""
        torch = self._torch
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self._model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._model.device)
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=output_len, min_new_tokens=output_len,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return out[:, width:].tolist()
