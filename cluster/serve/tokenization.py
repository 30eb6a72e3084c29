"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from starlette.responses import Response

from cluster.serve.answers import Detokenized, Tokenized
from cluster.serve.chat import chat_rendering
from cluster.serve.large_answers import finished
from cluster.serve.protocol import DetokenizeRequest, TokenizeRequest
from cluster.serve.service import Service


async def tokenize(service: Service, request: TokenizeRequest) -> Tokenized | Response:
    """Token ids of a text or of a chat, as the completion endpoints would send them to the model. A large answer is a
    response already.

    Raises:
        RaydixError: an unknown model, or a chat that the template refuses.
    """
    service.check_model(request.model)
    if request.messages is not None:
        special = bool(request.add_special_tokens)
        ids, _ = await service.text.encode_chat(request.messages, chat_rendering(request), special)
    else:
        ids = await service.text.encode_text(request.prompt, request.add_special_tokens is not False)
    strings = await service.text.token_strings(ids) if request.return_token_strs else None
    return await finished(
        lambda: Tokenized(count=len(ids), max_model_len=service.max_seq_len, tokens=ids, token_strs=strings), len(ids)
    )


async def detokenize(service: Service, request: DetokenizeRequest) -> Detokenized:
    """The text of token ids.

    Raises:
        RaydixError: an unknown model, or an id outside its vocabulary.
    """
    service.check_model(request.model)
    service.text.check_ids(request.tokens, "tokens")
    return Detokenized(prompt=await service.text.decode(request.tokens, request.skip_special_tokens))
