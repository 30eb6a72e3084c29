"""What an engine turned out to be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.config import EngineConfig
from cluster.rank_startup import Whereabouts


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine turned out to be once it was ready.

    config            the effective settings: nothing that is derived at start-up is open any more
    ranks             where each rank runs: node, pid, GPU ids; changes with a recovery
    startup_seconds   seconds of each start-up phase, and their total
    """

    config: EngineConfig
    model_path: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    ranks: tuple[Whereabouts, ...]
    startup_seconds: dict[str, float]

    @property
    def served_name(self) -> str:
        return self.config.served_model_name

    @property
    def max_seq_len(self) -> int:
        """Longest prompt + output, in tokens."""
        return self.config.max_seq_len

    @property
    def num_pages(self) -> int:
        """Usable KV pages."""
        return self.config.num_pages

    def __str__(self) -> str:
        settings = self.config.model_dump()
        lines = ["settings: " + ", ".join(f"{name}={value}" for name, value in settings.items())]
        for number, rank in enumerate(self.ranks):
            where = f"GPU {','.join(rank.gpu_ids)}" if rank.gpu_ids else "CPU"
            lines.append(f"rank {number}: node {rank.node_ip}, pid {rank.pid}, {where}")
        return "\n".join(lines)
