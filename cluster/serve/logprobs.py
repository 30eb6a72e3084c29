"""Log probabilities in the forms that OpenAI's and vLLM's answers have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.logprobs import finite
from cluster.serve.token_stream import ScoredToken
from cluster.tokenizer import Tokenizer
from scheduler.step import LogprobBlock


class LogprobWriter:
    """Log probabilities with their tokens' texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes

    def chat(self, scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
        """`logprobs.content` of a chat answer, one entry for each token."""
        return [
            self._chat_entry(token, float(block.logprobs[0]))
            | {"top_logprobs": [self._chat_entry(*alternative) for alternative in _alternatives(block, 0)]}
            for token, block in scored
        ]

    def completion(self, scored: Sequence[ScoredToken], offsets: Sequence[int]) -> dict[str, Any]:
        """`logprobs` of a completion; `offsets`: where in the choice's text each of these tokens begins.

        The token itself is among `top_logprobs` even when it is not one of the likeliest, as with OpenAI. Of several
        tokens with one name it is the one that counts, else the likeliest.
        """
        names = [self._name(token) for token, _ in scored]
        own = [finite(float(block.logprobs[0])) for _, block in scored]
        return {
            "tokens": names,
            "token_logprobs": own,
            "top_logprobs": [
                self._top(name, logprob, block) if block.top else None
                for name, logprob, (_, block) in zip(names, own, scored, strict=True)
            ],
            "text_offset": list(offsets),
        }

    def echoed(self, prompt: list[int], block: LogprobBlock | None, top: int, offsets: Sequence[int]) -> dict[str, Any]:
        """`logprobs` of a prompt that is part of a completion; of its first token there are none.

        `block`: of the tokens from the second on; `top`: how many alternatives were asked for.
        """
        empty = LogprobBlock.joined([], top)
        block = empty if block is None else block.narrowed(top)
        rest = [ScoredToken(token, LogprobBlock(block.words[i : i + 1])) for i, token in enumerate(prompt[1:])]
        written = self.completion(rest, offsets[1:])
        return {
            "tokens": [self._name(prompt[0]), *written["tokens"]],
            "token_logprobs": [None, *written["token_logprobs"]],
            "top_logprobs": [None, *written["top_logprobs"]],
            "text_offset": list(offsets),
        }

    def prompt(self, prompt: list[int], block: LogprobBlock | None) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`, vLLM's field: for each prompt token but the first, id -> what is known of it."""
        entries: list[dict[str, Any] | None] = [None]
        for i, token in enumerate(prompt[1:]):
            entry = {str(token): self._prompt_entry(token, float(block.logprobs[i]), int(block.ranks[i]))}
            for rank, (other, logprob) in enumerate(_alternatives(block, i), 1):
                entry.setdefault(str(other), self._prompt_entry(other, logprob, rank))
            entries.append(entry)
        return entries

    def _chat_entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": finite(logprob), "bytes": list(self._token_bytes[token])}

    def _prompt_entry(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": self._text(token)}

    def _top(self, name: str, logprob: float, block: LogprobBlock) -> dict[str, float]:
        top = {name: logprob}
        for token, value in _alternatives(block, 0):
            top.setdefault(self._name(token), finite(value))
        return top

    def _text(self, token: int) -> str:
        """Half a character, which a token may be, becomes U+FFFD."""
        return self._token_bytes[token].decode("utf-8", errors="replace")

    def _name(self, token: int) -> str:
        """The token's text or, where that is not whole characters, its bytes as OpenAI's completions write them:
        `bytes:\\xf0\\x9f`. U+FFFD would be the name of all of them."""
        data = self._token_bytes[token]
        try:
            return data.decode()
        except UnicodeDecodeError:
            printed = [chr(byte) if 0x20 <= byte < 0x7F and byte != 0x5C else f"\\x{byte:02x}" for byte in data]
            return f"bytes:{''.join(printed)}"


def _alternatives(block: LogprobBlock, place: int) -> list[tuple[int, float]]:
    """(token id, log probability) of the likeliest at this place, best first."""
    pairs = zip(block.top_ids[place].tolist(), block.top_logprobs[place].tolist(), strict=True)
    return [(token, logprob) for token, logprob in pairs if token >= 0]
