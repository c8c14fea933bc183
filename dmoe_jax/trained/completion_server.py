"""OpenAI's completions over HTTP: a request becomes prompts of one model, and text goes back as it is written.

A client that leaves ends its completions; so does one that takes what is sent too slowly.
"""

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import Any

import trio

from dmoe_jax.metrics.http_server import Answer, Page, Request, Send, open_http_server, refusal_of_strangers
from dmoe_jax.trained.completions import (
    STREAM_END,
    Completion,
    CompletionError,
    CompletionLimits,
    CompletionRequest,
    completion_request_untrusted,
    error_body,
    piece_event,
    whole_answer,
)
from dmoe_jax.trained.language_model import AsyncTrainedModel, Text
from dmoe_net.errors import NetError
from dmoe_net.identity import Address

logger = logging.getLogger(__name__)

_JSON, _EVENTS = "application/json", "text/event-stream"

MAX_BODY_BYTES = 1 << 20
"""Longest request."""
MAX_CLIENTS = 256
"""Clients at once, most of which wait."""


@asynccontextmanager
async def open_completions(
    address: Address, model: AsyncTrainedModel, *, name: str, limits: CompletionLimits, at_once: int
) -> AsyncIterator[Address]:
    """Serve completions while the block runs; yields the address with the port chosen.

    Args:
      address: to listen at. model: writes. name: that of the model, for the answers.
      at_once: requests that are answered at the same time; others wait.

    Raises:
      ListenFailed: the port is taken, or the address is not this machine's.
    """
    served = _Served(model, name, limits, at_once)
    pages: dict[str, Page] = {"POST /v1/completions": served.complete, "/v1/models": served.models}
    pages = {path: partial(_guarded, page, address.host) for path, page in pages.items()}
    opening = open_http_server(
        address, pages, max_body_bytes=MAX_BODY_BYTES, max_clients=MAX_CLIENTS, as_error=partial(_as_error, [*pages])
    )
    async with opening as listening:
        yield listening


def _as_error(pages: Sequence[str], answer: Answer) -> Answer:
    """Put a refusal, or a failure that the HTTP server has met, into the form of OpenAI's errors."""
    if answer.content_type == _JSON or not isinstance(answer.body, bytes):
        return answer
    message = answer.body.decode().strip()
    if answer.status == HTTPStatus.NOT_FOUND:
        message += f"; this server has {' and '.join(each if ' ' in each else f'GET {each}' for each in pages)}"
    return answer._replace(body=error_body(message, status=answer.status), content_type=_JSON)


async def _guarded(page: Page, host: str, request: Request) -> Answer:
    return refusal_of_strangers(request, host) or await page(request)


class _Served:
    def __init__(self, model: AsyncTrainedModel, name: str, limits: CompletionLimits, at_once: int) -> None:
        self._model, self._name, self._limits = model, name, limits
        self._room = trio.CapacityLimiter(at_once)

    async def models(self, request: Request) -> Answer:
        del request
        own = {"id": self._name, "object": "model", "created": 0, "owned_by": "dmoe_jax"}
        return Answer(json.dumps({"object": "list", "data": [own]}).encode(), content_type=_JSON)

    async def complete(self, request: Request) -> Answer:
        try:
            asked = completion_request_untrusted(request.body, self._limits, seed=secrets.randbits(62))
            try:
                prompts: list[Text] = [self._model.encode(prompt) for prompt in asked.prompts]
            except ValueError as error:
                raise CompletionError(str(error), param="prompt") from error
            if (total := len(prompts) * max(map(len, prompts))) > self._limits.most_tokens:
                most = f"{self._limits.most_tokens} tokens"
                raise CompletionError(f"prompts have at most {most} together, got {total}", param="prompt")
        except CompletionError as error:
            return Answer(error.body(), HTTPStatus.BAD_REQUEST, _JSON)
        head: dict[str, Any] = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion"}
        head |= {"created": int(time.time()), "model": self._name}
        written = [Completion(asked.stop) for _ in prompts]
        if asked.streams:
            return Answer(partial(self._stream, asked, prompts, head, written), content_type=_EVENTS)

        def add(number: int, piece: str) -> bool:
            written[number].add(piece)
            return written[number].is_stopped

        try:
            async with self._room:
                done = await self._model.generate(prompts, words=asked.words, on_piece=add, **asdict(asked.sampling))
        except NetError as error:
            return Answer(_failure(error), HTTPStatus.SERVICE_UNAVAILABLE, _JSON)
        for completion, each in zip(written, done, strict=True):
            completion.end()
            completion.tokens = len(each.ids)
        return Answer(whole_answer(head, written, sum(map(len, prompts[:: asked.number]))), content_type=_JSON)

    async def _stream(
        self,
        asked: CompletionRequest,
        prompts: Sequence[Text],
        head: Mapping[str, Any],
        written: Sequence[Completion],
        send: Send,
    ) -> None:
        """Send each piece as an event, when it is certain to be part of the text."""
        pieces: trio.MemorySendChannel[bytes]
        # Bounded by what was asked for: a piece a word, and the ends.
        pieces, events = trio.open_memory_channel((asked.words + 2) * len(prompts))

        def add(number: int, piece: str) -> bool:
            completion = written[number]
            if certain := completion.add(piece):
                pieces.send_nowait(piece_event(head, number, certain))
            return completion.is_stopped

        async def write() -> None:
            with pieces:
                try:
                    async with self._room:
                        await self._model.generate(prompts, words=asked.words, on_piece=add, **asdict(asked.sampling))
                except NetError as error:
                    pieces.send_nowait(b"data: %b\n\n" % _failure(error))
                    return
                for number, completion in enumerate(written):
                    pieces.send_nowait(piece_event(head, number, completion.end(), completion))
                pieces.send_nowait(STREAM_END)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            async for event in events:
                await send(event)


def _failure(error: NetError) -> bytes:
    """The body that says that the swarm could not carry it."""
    logger.warning("a completion was not finished: %s", error)
    return error_body(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE)
