"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from cluster.errors import InvalidRequestError
from cluster.serve.answers import AssistantMessage, ChatChoice, ChatCompletion, FunctionCall, MessageToolCall, new_id
from cluster.serve.assistant import AnswerReader, answer_readers
from cluster.serve.output_format import after_reasoning, tool_calls
from cluster.serve.parsers import reasoning
from cluster.serve.protocol import ChatCompletionRequest, TokenizeRequest
from cluster.serve.service import Choice, ChunkWriter, Service, UsageCounter
from cluster.serve.sse import to_json
from cluster.serve.text import ChatRendering
from cluster.serve.token_stream import Delta, ScoredToken
from scheduler.structured_outputs import StructuredOutputs


async def chat_completion(
    service: Service, request: ChatCompletionRequest, arrived: float
) -> ChatCompletion | Response:
    """Answer a chat request, whole or as a stream. A large answer is a response already, and so is a stream.

    Raises:
        RaydixError: before the first token; later errors are the stream's last event.
    """
    service.check_model(request.model)
    if request.offered_tools and service.tool_parser is None:
        raise InvalidRequestError(
            "tools: this model's chat template teaches no format of tool calls that this server reads; leave 'tools' "
            "out, or set 'tool_choice' to 'none'",
            "tools",
        )
    forced = forced_beginning(service, request)
    prompt, text = await service.text.encode_chat(request.messages, chat_rendering(request, forced))
    form = None
    if request.must_call or request.output_format is not None:  # large ones take a while
        form = await asyncio.to_thread(answer_form, service, request, text)
    pairs = service.plan(request, [prompt], "messages", None, form)
    readers = answer_readers(service, request, text, forced, len(pairs))
    continues = bool(request.continue_final_message)
    group = service.engine.open(pairs, service.options(request, arrived, continues_text=continues))
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
                    whole_choice(service, request, i, choice, reader)
                    for i, (choice, reader) in enumerate(zip(choices, readers, strict=True))
                ],
                usage=count.usage,
                prompt_logprobs=(
                    None
                    if request.prompt_logprobs is None
                    else service.logprobs.prompt(prompt, choices[0].prompt_logprobs)
                ),
            ),
        )

    writer = ChunkWriter(
        answer_id, "chat.completion.chunk", service.model, count, request.with_usage, request.continuous_usage
    )

    waiting: list[list[ScoredToken]] = [[] for _ in pairs]  # log probabilities not sent yet

    def begin() -> Sequence[str]:
        return [writer.choice(i, '"delta":{"role":"assistant","content":""}', None) for i in range(len(pairs))]

    def chunks(index: int, delta: Delta) -> Sequence[str]:
        parts: list[tuple[dict[str, Any], str | None]] = [
            (part, None) for part in readers[index].read(delta.text, delta.finish_reason)
        ]
        if delta.finish_reason:
            parts.append(({}, readers[index].finish_reason(delta.finish_reason)))
        if delta.logprobs:
            waiting[index] += delta.logprobs
        written = []
        for part, reason in parts:
            # with the first chunk that has room for them, be it the one that ends the choice
            scores = {"content": service.logprobs.chat(waiting[index])} if waiting[index] else None
            waiting[index] = []
            written.append(writer.choice(index, f'"delta":{to_json(part)}', reason, scores))
        return written

    return await service.stream(group, writer, begin, chunks)


def chat_rendering(request: ChatCompletionRequest | TokenizeRequest, forced: str = "") -> ChatRendering:
    """How the request's messages are to be rendered; `forced`: what the answer is made to begin with."""
    variables = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatCompletionRequest) and request.offered_tools:
        variables["tools"] = [tool.for_template() for tool in request.offered_tools]
    return ChatRendering(
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final=bool(request.continue_final_message),
        suffix=forced,
        variables=variables,
    )


def forced_beginning(service: Service, request: ChatCompletionRequest) -> str:
    """The beginning of the call that `tool_choice` requires; empty if it requires none."""
    return service.tool_parser.prefix(request.only_function) if request.must_call else ""


def answer_form(service: Service, request: ChatCompletionRequest, text: str) -> StructuredOutputs | None:
    """What the answer to this rendered chat must follow; None: nothing.

    The calls that `tool_choice` requires, or the request's form, which begins after any reasoning.

    Raises:
        InvalidRequestError: a grammar or schema that cannot be read.
    """
    if request.must_call:
        several = request.tool_choice == "required" and request.parallel_tool_calls is not False
        return tool_calls(request.offered_tools, service.tool_parser, request.only_function, several)
    form = request.output_format
    if form is None or not service.has_reasoning or request.continue_final_message:
        return form
    if text.rstrip().endswith(reasoning.CLOSE):  # the template switched it off
        return form
    return after_reasoning(form, reasoning.is_open(text))


def whole_choice(
    service: Service, request: ChatCompletionRequest, index: int, choice: Choice, reader: AnswerReader
) -> ChatChoice:
    """A choice of an answer without `stream`."""
    content, reasoning, calls = [], [], []
    for part in reader.read(choice.text, choice.finish_reason):
        content.append(part.get("content", ""))
        reasoning.append(part.get("reasoning_content", ""))
        for call in part.get("tool_calls", ()):
            if "id" in call:
                function = FunctionCall(name=call["function"]["name"], arguments="")
                calls.append(MessageToolCall(id=call["id"], function=function))
            calls[call["index"]].function.arguments += call["function"]["arguments"]
    text = "".join(content)
    message = AssistantMessage(
        content=text if text or not calls else None,
        reasoning_content="".join(reasoning) or None,
        tool_calls=calls or None,
    )
    return ChatChoice(
        index=index,
        message=message,
        logprobs={"content": service.logprobs.chat(choice.logprobs)} if request.logprobs else None,
        finish_reason=reader.finish_reason(choice.finish_reason),
    )
