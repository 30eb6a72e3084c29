"""What an examination found, one finding per check and place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """`WARNING` is worth knowing and does not fail the examination."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` is what was looked at, `where` on which node or pair, `detail` what is there, `advice` what to do."""

    check: str
    where: str
    level: Level
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """An all-reduce between two: `latency` in seconds of a small one, `bandwidth` in bytes/s of a large one."""

    latency: float
    bandwidth: float
