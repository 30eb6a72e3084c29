"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.serve.answers import AssistantMessage, ChatChoice, ChatCompletion, new_id
from cluster.serve.protocol import ChatCompletionRequest
from cluster.serve.service import ChunkWriter, Service, UsageCounter
from cluster.serve.sse import EventStream, to_json
from cluster.serve.streams import Delta


async def chat_completion(service: Service, request: ChatCompletionRequest) -> ChatCompletion | EventStream:
    """Answer a chat request, whole or as a stream.

    Raises:
        RaydixError: before the first token; later errors are the stream's last event.
    """
    service.check_model(request.model)
    options = dict(request.chat_template_kwargs or {})
    if request.add_generation_prompt is not None:
        options["add_generation_prompt"] = request.add_generation_prompt
    messages = [message.for_template() for message in request.messages]
    prompt = await service.text.encode_chat(messages, options)
    pairs = service.plan(request, [prompt], "messages", None)
    group = service.engine.open(pairs, request.skip_special_tokens is not False)
    count = UsageCounter([prompt], request.choices)
    answer_id = new_id("chatcmpl")
    if not request.stream:
        return await service.answer(
            group,
            count,
            lambda choices: ChatCompletion(
                id=answer_id,
                model=service.model,
                choices=[
                    ChatChoice(index=i, message=AssistantMessage(content=c.text), finish_reason=c.finish_reason)
                    for i, c in enumerate(choices)
                ],
                usage=count.usage,
            ),
        )

    with_usage = request.stream_options is not None and request.stream_options.include_usage
    writer = ChunkWriter(answer_id, "chat.completion.chunk", service.model, with_usage)

    def chunks(index: int, delta: Delta) -> Sequence[str]:
        written = []
        if delta.text:
            written.append(writer.choice(index, f'"delta":{{"content":{to_json(delta.text)}}}', None))
        if delta.finish_reason:
            written.append(writer.choice(index, '"delta":{}', delta.finish_reason))
        return written

    begin = [writer.choice(i, '"delta":{"role":"assistant","content":""}', None) for i in range(len(pairs))]
    return await service.stream(group, count, begin, chunks, writer.usage if with_usage else None)
