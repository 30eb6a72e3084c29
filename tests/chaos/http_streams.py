"""Streams over HTTP as their clients see them."""

from __future__ import annotations

import json
import threading
import time

from tests.integration.http_server import Server, events, until

PROMPTS = ["Once upon a time", "The sea is", "A list of animals:\n1.", "def main():"]
REQUESTS = [
    {"prompt": PROMPTS[0], "temperature": 0},
    {"prompt": PROMPTS[1], "temperature": 0.9, "seed": 11},
    {"prompt": PROMPTS[2], "temperature": 0.8, "seed": 5, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"prompt": PROMPTS[3], "temperature": 0.7, "seed": 6, "stop": ["\n\n\n\n", "zzz"], "logprobs": 2, "echo": True},
]
COMMON = {"max_tokens": 80, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


class Reader(threading.Thread):
    """Reads one stream to its end. `patient`: tries again as long as it is told when to (503 with Retry-After)."""

    def __init__(self, server: Server, body: dict, patient: bool = False) -> None:
        super().__init__(daemon=True)
        self._patient = patient
        self.chunks: list[dict] = []
        self.times: list[float] = []  # `time.monotonic()` of each
        self.error: Exception | None = None
        self._server, self._body = server, body
        self.start()

    def run(self) -> None:
        try:
            while self._refused():
                time.sleep(0.5)
        except Exception as error:
            self.error = error

    def _refused(self) -> bool:
        """Whether to try again; otherwise the stream was read to its end."""
        with (
            self._server.client(timeout=300) as client,
            client.stream("POST", "/v1/completions", json=self._body) as response,
        ):
            if self._patient and response.status_code == 503 and "Retry-After" in response.headers:
                return True
            assert response.status_code == 200, response.read()
            for payload in events(response):
                self.chunks.append({} if payload == "[DONE]" else json.loads(payload))
                self.times.append(time.monotonic())
        return False

    def first_after(self, moment: float) -> float | None:
        """When the first chunk after a moment came."""
        return next((time for time in list(self.times) if time > moment), None)

    def result(self) -> dict:
        """Everything the client can see, without what differs from run to run: ids, times, where chunks end."""
        self.join(300)
        assert self.error is None and not self.is_alive(), self.error
        assert self.chunks[-1] == {}, self.chunks[-1]  # [DONE]
        choices = [chunk["choices"][0] for chunk in self.chunks[:-1] if chunk["choices"]]
        scores = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        usage = self.chunks[-2]["usage"] | {"prompt_tokens_details": None}
        return {
            "text": "".join(choice["text"] for choice in choices),
            "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            "tokens": [token for each in scores for token in each["tokens"]],
            "offsets": [offset for each in scores for offset in each["text_offset"]],
            "usage": usage,
        }


def start_all(server: Server) -> list[Reader]:
    return [Reader(server, COMMON | body) for body in REQUESTS]


def start_and_wait(server: Server, count: int) -> list[Reader]:
    """REQUESTS, each with so many chunks and none at its end: begun again if this process was away for too long."""
    for _ in range(5):
        readers = start_all(server)
        until(lambda: all(len(r.chunks) >= count or not r.is_alive() for r in readers), 120)  # noqa: B023
        if all(reader.is_alive() for reader in readers):
            return readers
        for reader in readers:
            reader.result()
    raise AssertionError(f"some of the streams ended before all had {count} chunks, five times")


def wait_for_chunks(readers: list[Reader], count: int) -> None:
    until(lambda: all(len(reader.chunks) >= count or not reader.is_alive() for reader in readers), 60)
    assert all(reader.is_alive() for reader in readers)
