"""`raydix generate`: prompts in, texts out, without a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import add_engine_flags, add_model_flags, engine_config, parse_model
from cluster.cli.output import Timeline, check_json_path, write_json
from cluster.errors import InvalidRequestError, RequestFailedError
from cluster.logprobs import Logprob, finite
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cluster.llm_stream import RequestOutput


def add_parser(commands: Any) -> None:
    """Adds the command to `commands`, an argparse sub-parser collection."""
    parser = commands.add_parser(
        "generate",
        help="generate text for prompts from the command line or stdin",
        description="Generates text for each prompt. Prompts come from the arguments or, without any, one a line "
        "from standard input.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; none: one a line from stdin")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message: use the chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before each prompt (implies --chat)")
    parser.add_argument(
        "--json", metavar="FILE", help="write texts, token ids, reasons and log probabilities into FILE as JSON"
    )
    add_model_flags(parser.add_argument_group("sampling"), SamplingParams)
    add_engine_flags(parser, positional_model=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generates, prints each text on stdout and each failure on stderr; returns 0, or 1 if a request failed."""
    from cluster.cli import EXIT_FAILED, EXIT_OK, fail

    config = engine_config(args)
    sampling = parse_model(SamplingParams, args)
    check_json_path(args.json)
    prompts = args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise InvalidRequestError("no prompts: give them as arguments or one a line on standard input")

    from cluster import LLM

    timeline = Timeline()
    with LLM(**config.model_dump(exclude_unset=True), progress=timeline) as llm:
        timeline.done()
        inputs: list[str] | list[list[int]] = prompts
        if args.chat or args.system is not None:
            inputs = [llm.tokenizer.apply_chat_template(chat(prompt, args.system)) for prompt in prompts]
        outputs = llm.generate(inputs, sampling)
    for prompt, output in zip(prompts, outputs, strict=True):
        if len(prompts) > 1:
            print(f"--- {prompt}")
        print(output.text)
    write_json(
        args.json,
        {
            "config": config.model_dump(mode="json"),
            "sampling": sampling.model_dump(by_alias=True),
            "outputs": [as_json(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)],
        },
    )
    code = EXIT_OK
    for index, output in enumerate(outputs):
        if output.error is not None:
            where = f"prompt {index}: " if len(prompts) > 1 else ""
            code = fail(RequestFailedError(f"{where}{output.error}"), EXIT_FAILED)
    return code


def as_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """What --json writes of one prompt; log probabilities by token id, None where none were asked for."""
    return {
        "prompt": prompt,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "error": output.error,
        "prompt_token_ids": [int(id) for id in output.prompt_token_ids],
        "token_ids": [int(id) for id in output.token_ids],
        "cached_tokens": int(output.cached_tokens),
        "logprobs": as_rows(output.logprobs),
        "prompt_logprobs": as_rows(output.prompt_logprobs),
    }


def as_rows(logprobs: Sequence[dict[int, Logprob] | None] | None) -> list[dict[int, dict[str, Any]] | None] | None:
    """One dictionary for each token, None for a prompt's first."""
    if logprobs is None:
        return None
    return [
        row and {token: {"logprob": finite(each.logprob), "rank": each.rank} for token, each in row.items()}
        for row in logprobs
    ]


def chat(prompt: str, system: str | None) -> list[dict[str, str]]:
    """The messages of a chat that begins with `prompt`."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]
