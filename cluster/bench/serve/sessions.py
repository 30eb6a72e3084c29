"""What is sent: sessions of turns. Made up, or read from conversations and traces.

Made-up text consists of common English words, about one token each for every tokenizer in use; what a prompt came to is
in the server's own count. Equal pieces of a trace give equal text, so prefixes are shared as the trace says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cluster.errors import ConfigError
from cluster.simulate.tokens import Segment, prompt_tokens
from cluster.simulate.traces import BYTES_PER_TOKEN, Trace, exchanges, session_starts

_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what is new in its prompt, the tokens wanted, and the pause (seconds) after the answer before."""

    text: str
    output_len: int
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow one another; each prompt holds all before it, with the server's own answers.

    `start`: seconds from the start of the run, where the load has arrival times. `opening`: messages before the first
    turn, as (role, text).
    """

    start: float
    turns: tuple[Turn, ...]
    opening: tuple[tuple[str, str], ...] = ()


def words(segments: tuple[Segment, ...]) -> str:
    """The text of pieces of a trace: a word for each token."""
    return "".join(" " + WORDS[index] for index in prompt_tokens(segments, len(WORDS)).tolist())


def from_trace(trace: Trace) -> list[Session]:
    """A session for each request that waits for no other, with those that wait for it."""
    turns: list[list[Turn]] = []
    session_of: dict[int, int] = {}
    starts: list[float] = []
    for number, request in enumerate(trace.requests):
        if request.after is None:
            session_of[number] = len(turns)
            starts.append(request.arrival)
            turns.append([Turn(words(request.prompt), request.output_len)])
        else:
            session_of[number] = session_of[request.after]
            new = request.prompt[len(trace.requests[request.after].prompt) + 1 :]  # after that one's answer
            turns[session_of[number]].append(Turn(words(new), request.output_len, request.arrival))
    return [Session(start, tuple(parts)) for start, parts in zip(starts, turns, strict=True)]


def load_conversations(path: Path, limit: int | None, rate: float, think_time: float, seed: int) -> list[Session]:
    """Sessions with the words of a file; an answer's wanted length is that of the file's.

    The file is ShareGPT's JSON list of {"conversations": [{"from", "value"}]}, or lines of {"messages": [{"role",
    "content"}]} as OpenAI writes them.

    Args:
        limit: at most so many requests from the front.
        rate: requests a second; think_time: mean pause within a session, seconds.

    Raises:
        ConfigError: the file cannot be read, or an entry is of another kind; names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the conversations {path}: {error}") from error
    found = _sharegpt(path, text) if text.lstrip()[:1] == "[" else _chat_lines(path, text)
    sessions = [session for session in found if session.turns]
    if not sessions:
        raise ConfigError(f"{path} holds no question with an answer")
    rng = np.random.default_rng(seed)
    turns = sum(len(session.turns) for session in sessions) / len(sessions)
    starts = session_starts(len(sessions), rate / turns, rng).tolist()
    chosen, left = [], limit if limit is not None else sum(len(session.turns) for session in sessions)
    for start, session in zip(starts, sessions, strict=True):
        first, *more = session.turns[:left]
        paused = (replace(turn, pause=float(rng.exponential(think_time))) for turn in more)
        chosen.append(replace(session, start=start, turns=(first, *paused)))
        left -= 1 + len(more)
        if not left:
            break
    return chosen


def _sharegpt(path: Path, text: str) -> list[Session]:
    try:
        pairs = [exchanges(entry["conversations"]) for entry in json.loads(text)]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no ShareGPT file (a list of objects with `conversations` of `from` and `value`): {error!r}"
        ) from error
    return [Session(0.0, tuple(Turn(question, _length(answer)) for question, answer in found)) for found in pairs]


def _chat_lines(path: Path, text: str) -> list[Session]:
    sessions = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            sessions.append(_chat(json.loads(line)["messages"]))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} line {number} is no conversation (an object with `messages` of `role` and `content`): "
                f"{error!r}"
            ) from error
    return sessions


def _chat(messages: list[dict[str, Any]]) -> Session:
    """System messages open the session; a user's message without an answer of known length is left out."""
    opening, turns, question = [], [], None
    for message in messages:
        role, content = message["role"], str(message["content"])
        if role == "user":
            question = content
        elif role == "assistant" and question is not None:
            turns.append(Turn(question, _length(content)))
            question = None
        elif role in ("system", "developer") and not turns:
            opening.append((role, content))
    return Session(0.0, tuple(turns), tuple(opening))


def _length(answer: str) -> int:
    return max(1, len(answer.encode()) // BYTES_PER_TOKEN)
