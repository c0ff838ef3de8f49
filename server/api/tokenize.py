"""`POST /tokenize` and `POST /detokenize`: what the model's tokenizer makes of texts, conversations and ids.

Owns the replies. Refuses to know how a prompt is rendered (`prompts`).
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from peagle.errors import InvalidParameterError
from server.answer_parts import token_text
from server.api.body_docs import BodyDocs
from server.dependencies import BundleDep, DetokenizeRequestDep, DoorDep, TokenizeRequestDep
from server.json_bodies import ignored_header
from server.prompts import tokenize_prompt
from server.schemas.errors import ErrorEnvelope
from server.schemas.tokenize import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest

router = APIRouter(responses={"4XX": {"model": ErrorEnvelope}, "5XX": {"model": ErrorEnvelope}})
TOKENIZE_BODY, DETOKENIZE_BODY = BodyDocs.of(TokenizeRequest), BodyDocs.of(DetokenizeRequest)


@router.post("/tokenize", response_model=TokenizeReply, openapi_extra=TOKENIZE_BODY.extra)
async def tokenize(body: TokenizeRequestDep, door: DoorDep, bundle: BundleDep) -> Response:
    """Token ids of a text, or of a conversation as its prompt has them."""
    if body.model is not None:
        door.check_model(body.model)
    if body.tools is not None:
        raise InvalidParameterError(
            "'tools' are not supported by this server: leave them out.", param="tools", code="unsupported_parameter"
        )
    token_ids = await tokenize_prompt(bundle, body)
    reply = TokenizeReply(
        count=len(token_ids),
        max_model_len=bundle.engine.max_model_len,
        tokens=token_ids,
        token_strs=[token_text(bundle.tokenizer, token_id) for token_id in token_ids]
        if body.return_token_strs
        else None,
    )
    return Response(reply.model_dump_json(), headers=dict(ignored_header(body)), media_type="application/json")


@router.post("/detokenize", response_model=DetokenizeReply, openapi_extra=DETOKENIZE_BODY.extra)
async def detokenize(body: DetokenizeRequestDep, door: DoorDep, bundle: BundleDep) -> Response:
    """The text of token ids, special tokens included."""
    if body.model is not None:
        door.check_model(body.model)
    vocab_size = bundle.tokenizer.vocab_size
    for index, token_id in enumerate(body.tokens):
        if token_id >= vocab_size:
            raise InvalidParameterError(
                f"token id {token_id} is not in the vocabulary, which ends at {vocab_size - 1}",
                param=f"tokens[{index}]",
            )
    reply = DetokenizeReply(prompt=bundle.tokenizer.decode(body.tokens, skip_special_tokens=False))
    return Response(reply.model_dump_json(), headers=dict(ignored_header(body)), media_type="application/json")
