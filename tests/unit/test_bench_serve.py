"""The HTTP load generator against a stub server."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise

import pytest

from cluster.bench.serve.client import Call, Endpoint
from cluster.bench.serve.generator import Run, send, warm_up
from cluster.bench.serve.paths import median_run
from cluster.bench.serve.report import request_rows, summarise
from cluster.bench.serve.sessions import WORDS, Session, Turn, load_conversations
from cluster.cli import build_parser, main
from cluster.cli.bench_serve import extra_members, make_sessions
from cluster.errors import ConfigError
from cluster.progress_bar import ProgressBar
from tests.unit.stub_server import Stub, chat, completion, event, running


def endpoint(stub: Stub, kind: str = "completions", timeout: float = 60.0, **extra) -> Endpoint:
    return Endpoint(stub.url + "/v1", kind, None, "sk-secret", extra, timeout)


async def one_call(stub: Stub, kind: str = "completions", timeout: float = 60.0, **extra) -> Call:
    async with running(stub), endpoint(stub, kind, timeout, **extra) as server:
        call = Call(0, 0, time.perf_counter())
        await server.run(call, [("system", "Be brief."), ("user", " hello")], 3)
        return call


async def test_a_completion():
    stub = Stub(lambda path, body: completion(" a", " b", " c", prompt=7, cached=4), delay=0.02)
    call = await one_call(stub, temperature=0.5)
    assert call.error is None and call.text == " a b c"
    assert (call.prompt_tokens, call.output_tokens, call.cached_tokens) == (7, 3, 4)
    assert len(call.chunks) == 3
    assert call.started + 0.015 < call.chunks[0] < call.chunks[1] < call.chunks[2] < call.ended
    ((path, headers, body),) = stub.requests
    assert path == "/v1/completions" and headers["authorization"] == "Bearer sk-secret"
    assert body == {
        "model": "stub-model",
        "prompt": "Be brief. hello",
        "max_tokens": 3,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_chat_whose_server_counts_nothing():
    stub = Stub(lambda path, body: chat("Hi", " there", "\n\n"))
    call = await one_call(stub, "chat")
    assert (call.text, call.output_tokens, call.error) == ("Hi there\n\n", 3, None)
    ((path, _, body),) = stub.requests
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hello"}]


async def test_events_cut_at_any_byte():
    status, pieces = completion(" \N{SNOWMAN}", ' "\\n')
    whole = b": a comment\n\n" + b"".join(pieces).replace(b"\n\n", b"\r\n\r\n")
    for size in (1, 7):
        parts = [whole[at : at + size] for at in range(0, len(whole), size)]
        call = await one_call(Stub(lambda path, body, parts=parts: (status, parts)))
        assert (call.text, call.error, len(call.chunks)) == (' \N{SNOWMAN} "\\n', None, 2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((429, [b'{"error": {"message": "too many", "type": "x"}}']), "429 too many"),
        ((500, [b"<html>oops"]), "500 <html>oops"),
        ((200, [event({"choices": [{"text": "a"}]}), event({"error": {"message": "died"}})]), "in the stream: died"),
        ((200, [event({"choices": [{"text": "a"}]})]), "the stream ended early"),
        ((200, [event(b"{broken")]), "JSONDecodeError"),
    ],
)
async def test_errors(answer, message):
    call = await one_call(Stub(lambda path, body: answer))
    assert message in call.error


async def test_a_timeout():
    call = await one_call(Stub(lambda path, body: completion("a", "b"), delay=0.5), timeout=0.2, model="stub-model")
    assert call.error == "no end within 0.2 s"


async def test_nobody_listens():
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:9"):
        async with Endpoint("http://127.0.0.1:9", "chat", None, None, {}, 5.0):
            pass


def sessions(count: int, turns: int = 1, spacing: float = 0.0) -> list[Session]:
    return [Session(n * spacing, tuple(Turn(f" q{n}.{t}", 2) for t in range(turns))) for n in range(count)]


async def test_closed_loop_keeps_so_many_side_by_side():
    open_now = most = 0

    class Counting(Endpoint):
        async def run(self, call, messages, output_len):
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            await super().run(call, messages, output_len)
            open_now -= 1

    stub = Stub(lambda path, body: completion(" x", " y"), delay=0.005)
    async with running(stub), Counting(stub.url, "completions", None, None, {}, 5.0) as server:
        run = await send(server, sessions(12), 3, ProgressBar())
    assert most == 3
    assert [call.session for call in run.calls] != [] and {call.session for call in run.calls} == set(range(12))
    summary = summarise(run)
    assert (summary["completed"], summary["failed"], summary["output_tokens"]) == (12, 0, 24)


async def test_open_loop_keeps_its_times():
    stub = Stub(lambda path, body: completion(" x"), delay=0.5)  # three pieces: 1.5 s an answer
    async with running(stub), endpoint(stub) as server:
        run = await send(server, sessions(5, spacing=0.05), None, ProgressBar())
    rows = request_rows(run)
    sent = [row["sent_s"] for row in rows]
    assert all(time >= n * 0.05 for n, time in enumerate(sent)), sent
    assert sent[-1] < min(row["sent_s"] + row["e2e_s"] for row in rows), rows  # nobody waited for an answer


async def test_turns_carry_the_servers_answers():
    stub = Stub(lambda path, body: completion(" yes", cached=8))
    async with running(stub), endpoint(stub) as server:
        await send(server, sessions(1, turns=3), 1, ProgressBar())
    assert [body["prompt"] for _, _, body in stub.requests] == [
        " q0.0",
        " q0.0 yes q0.1",
        " q0.0 yes q0.1 yes q0.2",
    ]


async def test_what_follows_a_failure_is_skipped():
    def script(path, body):
        return (503, [b"no"]) if body["prompt"] == " q1.0" else completion(" ok")

    stub = Stub(script)
    async with running(stub), endpoint(stub) as server:
        run = await send(server, sessions(3, turns=2), 2, ProgressBar())
        with pytest.raises(ConfigError, match="fails the first request: 503 no"):
            await warm_up(server, sessions(2), 1)
    summary = summarise(run)
    assert (summary["requests"], summary["completed"], summary["failed"], summary["skipped"]) == (6, 4, 1, 1)
    assert summary["errors"] == {"503 no": 1}


def test_summary():
    first = Call(0, 0, due=0.0, started=1.0, ended=2.0, chunks=[1.1, 1.3, 1.6], prompt_tokens=10, output_tokens=6)
    second = Call(1, 0, due=1.0, started=1.0, ended=3.0, chunks=[1.5], prompt_tokens=10, output_tokens=1)
    second.cached_tokens = 5
    failed = Call(2, 0, due=1.0, started=1.0, ended=1.5, error="503 no")
    summary = summarise(Run([first, second, failed], 0.0, 4.0, 0.5, 0))
    assert summary["output_tokens_per_s"] == pytest.approx(7 / 4)
    assert summary["ttft_s"]["mean"] == pytest.approx(0.3)
    assert summary["itl_s"]["max"] == pytest.approx(0.3)
    assert summary["tpot_s"]["p50"] == pytest.approx(0.1)
    assert summary["e2e_s"]["p50"] == pytest.approx(1.5)
    assert summary["start_lag_s"]["max"] == pytest.approx(1.0)
    assert summary["tokens_per_chunk"] == pytest.approx(7 / 4)
    assert summary["cached_share"] == pytest.approx(0.25)
    json.dumps(summary, allow_nan=False)
    nothing = summarise(Run([failed], 0.0, 1.0, 0.0, 0))
    assert nothing["ttft_s"] is None and nothing["tokens_per_chunk"] is None


def test_the_run_of_median_throughput_counts():
    runs = [{"tokens_per_s": rate, "itl_p50_ms": rate * 2} for rate in (30.0, 10.0, 20.0)]
    assert median_run(runs) == {"tokens_per_s": 20.0, "itl_p50_ms": 40.0, "runs": [30.0, 10.0, 20.0]}


def made(*argv: str) -> list[Session]:
    return make_sessions(build_parser().parse_args(["bench", "serve", *argv]))


def test_random_load_is_the_same_every_time():
    found = made("--requests", "5", "--prompt-len", "uniform:4:9", "--output-len", "3", "--rate", "10")
    assert found == made("--requests", "5", "--prompt-len", "uniform:4:9", "--output-len", "3", "--rate", "10")
    assert len({session.turns[0].text for session in found}) == 5
    for session in found:
        (turn,) = session.turns
        assert 4 <= len(turn.text.split()) <= 9 and set(turn.text.split()) <= set(WORDS) and turn.output_len == 3
    assert all(a.start < b.start for a, b in pairwise(found))


def test_shared_prefixes():
    found = made("--workload", "shared-prefix", "--requests", "4", "--prefix-len", "50", "--prompt-len", "5")
    texts = [session.turns[0].text.split() for session in found]
    assert {tuple(text[:50]) for text in texts} == {tuple(texts[0][:50])}
    assert all(len(text) == 55 for text in texts) and len({tuple(text) for text in texts}) == 4


def test_turns_hold_only_what_is_new():
    found = made(
        "--workload", "multi-turn", "--turns", "3", "--requests", "6", "--prompt-len", "7", "--think-time", "2"
    )
    assert [len(session.turns) for session in found] == [3, 3]
    assert all(len(turn.text.split()) == 7 for session in found for turn in session.turns)
    assert found[0].turns[0].pause == 0 < found[0].turns[1].pause


def test_sharegpt(tmp_path):
    talk = [("human", "Hi?"), ("gpt", "Hello, there!"), ("human", "Bye"), ("gpt", "b"), ("human", "unanswered")]
    entries = [{"conversations": [{"from": who, "value": text} for who, text in talk]}, {"conversations": []}]
    file = tmp_path / "talks.json"
    file.write_text(json.dumps(entries * 2))
    found = load_conversations(file, None, 5.0, 1.0, 0)
    assert len(found) == 2
    assert [(turn.text, turn.output_len) for turn in found[0].turns] == [("Hi?", 3), ("Bye", 1)]
    assert [len(session.turns) for session in load_conversations(file, 3, 5.0, 1.0, 0)] == [2, 1]


def test_lines_of_messages(tmp_path):
    roles = [("system", "Be nice."), ("user", "one"), ("assistant", "x" * 40), ("user", "two"), ("assistant", "y")]
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in roles]}) + "\n\n")
    (session,) = made("--workload", "conversations", "--file", str(file))
    assert session.opening == (("system", "Be nice."),)
    assert [(turn.text, turn.output_len) for turn in session.turns] == [("one", 10), ("two", 1)]


def test_mooncake(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 4000, "input_length": 512, "output_length": 7, "hash_ids": [1]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = made("--workload", "mooncake", "--file", str(file), "--speed", "2")
    assert (first.start, second.start, second.turns[0].output_len) == (0.0, 2.0, 7)
    assert len(first.turns[0].text.split()) == 600 and first.turns[0].text.startswith(second.turns[0].text)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--workload", "mooncake"), "mooncake needs a --file"),
        (("--file", "x.json"), "random reads no --file"),
        (("--speed", "2"), "--speed is for mooncake"),
        (("--workload", "conversations", "--file", "/nowhere.json"), "cannot read the conversations"),
        (("--workload", "mooncake", "--file", "x", "--rate", "1"), "its own arrival times"),
        (("--prompt-len", "many"), "no length distribution"),
        (("--think-time", "-1"), "must not be negative"),
    ],
)
def test_wrong_flags(argv, message):
    with pytest.raises(ConfigError, match=message):
        made(*argv)


@pytest.mark.parametrize(
    "text", ['[{"conversations": 3}]', '{"messages": [{"role": "user"}]}', "{", '[{"a": []}]', "\n"]
)
def test_wrong_files(tmp_path, text):
    file = tmp_path / "talks"
    file.write_text(text)
    with pytest.raises(ConfigError, match="talks"):
        load_conversations(file, None, 1.0, 0.0, 0)


def test_extra_body():
    parse = build_parser().parse_args
    assert extra_members(parse(["bench", "serve"])) == {"temperature": 0.0, "ignore_eos": True}
    args = parse(["bench", "serve", "--no-ignore-eos", "--extra-body", '{"top_k": 3, "temperature": 1}'])
    assert extra_members(args) == {"temperature": 1, "top_k": 3}
    for wrong in ("{", "3"):
        with pytest.raises(ConfigError, match="--extra-body"):
            extra_members(parse(["bench", "serve", "--extra-body", wrong]))


async def test_the_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    stub = Stub(lambda path, body: completion(" a", " b") if body["max_tokens"] < 9 else (400, [b'{"error": "long"}']))
    report, picture = tmp_path / "out.json", tmp_path / "out.png"
    async with running(stub):
        flags = ["--url", stub.url, "--json", str(report), "--plot", str(picture), "--requests", "8", "--rate", "200"]
        command = ["bench", "serve", "--api-key", "sk-x", "--prompt-len", "4", *flags]
        assert await asyncio.to_thread(main, [*command, "--output-len", "2"]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        result = json.loads(report.read_text())
        assert await asyncio.to_thread(main, [*command, "--output-len", "9"]) == 1
    assert result["summary"]["completed"] == len(result["requests"]) == 8
    assert "sk-x" not in report.read_text()
    shown = capsys.readouterr().out
    assert "8 of 8 requests" in shown and "first token" in shown
    assert "8 x 400 long" in shown
