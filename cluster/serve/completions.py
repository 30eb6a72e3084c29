"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.serve.answers import Completion, CompletionChoice, new_id
from cluster.serve.protocol import COMPLETION_DEFAULT_MAX_TOKENS, CompletionRequest
from cluster.serve.service import ChunkWriter, Service, UsageCounter
from cluster.serve.sse import EventStream, to_json
from cluster.serve.streams import Delta


async def completion(service: Service, request: CompletionRequest, arrived: float) -> Completion | EventStream:
    """Answer a text completion, whole or as a stream; several prompts give `n` choices each, in their order.

    Raises:
        RaydixError: before the first token; later errors are the stream's last event.
    """
    service.check_model(request.model)
    prompts = await asyncio.gather(*(service.text.encode(prompt) for prompt in request.prompts))
    pairs = service.plan(request, prompts, "prompt", COMPLETION_DEFAULT_MAX_TOKENS)
    echoes = await echoed_texts(service, request)
    group = service.engine.open(pairs, service.options(request, arrived, continues_text=True))
    count = UsageCounter(prompts, request.choices)
    answer_id = new_id("cmpl")
    if not request.stream:
        return await service.answer(
            group,
            count,
            lambda choices: Completion(
                id=answer_id,
                model=service.model,
                choices=[
                    CompletionChoice(
                        index=i, text=echoes[i // request.choices] + choice.text, finish_reason=choice.finish_reason
                    )
                    for i, choice in enumerate(choices)
                ],
                usage=count.usage,
            ),
        )

    writer = ChunkWriter(
        answer_id, "text_completion", service.model, count, request.with_usage, request.continuous_usage
    )

    def begin() -> Sequence[str]:
        texts = [echoes[i // request.choices] for i in range(len(pairs))]
        return [writer.choice(i, f'"text":{to_json(text)}', None) for i, text in enumerate(texts) if text]

    def chunks(index: int, delta: Delta) -> Sequence[str]:
        return [writer.choice(index, f'"text":{to_json(delta.text)}', delta.finish_reason)]

    return await service.stream(group, writer, begin, chunks)


async def echoed_texts(service: Service, request: CompletionRequest) -> list[str]:
    """What `echo` puts before the choices of each prompt: the prompt's text, or nothing without it."""
    if not request.echo:
        return [""] * len(request.prompts)
    skip_special = request.skip_special_tokens is not False
    return [
        prompt if isinstance(prompt, str) else await service.text.decode(prompt, skip_special)
        for prompt in request.prompts
    ]
