"""OpenAI's completions, the form in which most programs ask a language model for text: requests read, answers made.

Nothing here knows a network or a model. A request is a stranger's: `CompletionLimits` bound what it may ask for, and
a field that has no meaning here is refused unless it is left at what changes nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from http import HTTPStatus
from typing import Any

from dmoe_jax.trained.settings import Sampling

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256
"""Most texts that end a completion, and the longest of them."""

_NO_EFFECT: Mapping[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
}
"""Fields of the form that are not served, and values that ask for nothing."""

_KNOWN = {"model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "stream", "user"}


class CompletionError(ValueError):
    """A request that cannot be served; `param` is the field that is wrong."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> bytes:
        """Return the answer to the request."""
        return error_body(str(self), status=HTTPStatus.BAD_REQUEST, param=self.param)


def error_body(message: str, *, status: HTTPStatus, param: str | None = None) -> bytes:
    """Return what clients of OpenAI's read of an answer that is none; `param` is the field that is wrong."""
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": None}}).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionLimits:
    """Bounds of one request."""

    most_words: int = 1024
    """Most words of a completion."""
    most_prompts: int = 16
    """Most completions of a request: prompts times `n`."""
    most_characters: int = 65_536
    """Longest prompt; of a prompt of tokens the number of these."""
    most_tokens: int = 65_536
    """Most tokens of all prompts, each as often as it is continued, filled up to the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Text that somebody wants.

    Attributes:
      prompts: each `number` times in a row.
      number: completions of each prompt that are wanted.
      words: most tokens of each.
      stop: texts before which a completion ends.
      streams: True if it is sent as it is written.
    """

    prompts: tuple[str | tuple[int, ...], ...]
    number: int
    words: int
    sampling: Sampling
    stop: tuple[str, ...]
    streams: bool


def completion_request_untrusted(body: bytes, limits: CompletionLimits, *, seed: int) -> CompletionRequest:
    """The request in the body of a POST, with this seed if it names none. Raises CompletionError for anything else."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CompletionError("expected a JSON object") from error
    if not isinstance(told, dict):
        raise CompletionError(f"expected a JSON object, got {type(told).__name__}")
    for name, value in told.items():
        if name not in _KNOWN and value not in _NO_EFFECT.get(name, ()):
            raise CompletionError(f"{name:.40} is not served here", param=name[:40])
    number = _integer(told, "n", 1, 1, limits.most_prompts)
    prompts = _prompts_untrusted(told.get("prompt", ""), limits)
    most = min(limits.most_prompts, limits.most_tokens)  # each has a token at least
    if len(prompts) * number > most:
        raise CompletionError(f"at most {most} completions at once, got {len(prompts)} x {number}")
    streams = told.get("stream") or False
    if not isinstance(streams, bool):
        raise CompletionError(f"stream must be true or false, got {streams!r:.80}", param="stream")
    return CompletionRequest(
        prompts=tuple(prompt for prompt in prompts for _ in range(number)),
        number=number,
        words=_integer(told, "max_tokens", 16, 1, limits.most_words),
        sampling=_sampling_untrusted(told, seed),
        stop=_stops_untrusted(told.get("stop")),
        streams=streams,
    )


def _prompts_untrusted(prompt: object, limits: CompletionLimits) -> list[str | tuple[int, ...]]:
    several: list[Any] = prompt if isinstance(prompt, list) and prompt and not _is_tokens(prompt) else [prompt]
    found: list[str | tuple[int, ...]] = []
    for each in several:
        if not isinstance(each, str) and not _is_tokens(each):
            raise CompletionError("prompt must be a text, tokens, or a list of these", param="prompt")
        if len(each) > limits.most_characters:
            raise CompletionError(f"a prompt has at most {limits.most_characters}, got {len(each)}", param="prompt")
        found.append(each if isinstance(each, str) else tuple(each))
    return found


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 2**31 for each in value)


def _integer(told: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = default if told.get(name) is None else told[name]
    if type(value) is not int or not least <= value <= most:
        raise CompletionError(f"{name} must be an integer from {least} to {most}, got {value!r:.80}", param=name)
    return value


def _sampling_untrusted(told: Mapping[str, Any], seed: int) -> Sampling:
    given = {name: told[name] for name in ("temperature", "top_p") if told.get(name) is not None}
    for name, value in given.items():
        if type(value) not in (int, float):
            raise CompletionError(f"{name} must be a number, got {value!r:.80}", param=name)
    top_k = _integer(told, "top_k", 0, 0, 2**31 - 1)
    seed = _integer(told, "seed", seed, 0, 2**63 - 1)
    try:
        return Sampling(**{name: float(value) for name, value in given.items()}, top_k=top_k, seed=seed)
    except (ValueError, OverflowError) as error:
        raise CompletionError(str(error), param=str(error).partition(" ")[0]) from error


def _stops_untrusted(stop: object) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise CompletionError(f"stop must be a text or up to {MAX_STOPS} of them", param="stop")
    for each in stops:
        if not isinstance(each, str) or not 0 < len(each) <= MAX_STOP_CHARACTERS:
            raise CompletionError(f"a stop is a text of 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
    return tuple(stops)


@dataclass(slots=True)
class Completion:
    """One completion as it is written, cut before the first of the texts that end it."""

    stop: Sequence[str]
    _: KW_ONLY
    text: str = ""
    """Text that is certain to belong to it."""
    tokens: int = 0
    """Number of pieces that were added."""
    is_stopped: bool = False
    """True once one of the texts has come."""
    _held: str = field(default="")

    def add(self, piece: str) -> str:
        """Add a piece; return what is certain by now: the rest may be the beginning of a text that ends it."""
        if self.is_stopped:
            return ""
        self.tokens += 1
        self._held += piece
        ends = [place for each in self.stop if (place := self._held.find(each)) >= 0]
        if ends:
            self.is_stopped = True
            return self._certain(min(ends))
        longest = max((_overlap(self._held, each) for each in self.stop), default=0)
        return self._certain(len(self._held) - longest)

    def end(self) -> str:
        """Return what was held back: nothing more comes."""
        return "" if self.is_stopped else self._certain(len(self._held))

    def _certain(self, count: int) -> str:
        sent, self._held = self._held[:count], self._held[count:]
        self.text += sent
        return sent


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which `stop` begins, short of the whole."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)


def whole_answer(head: Mapping[str, Any], completions: Sequence[Completion], prompt_tokens: int) -> bytes:
    """Return the answer with all completions, of prompts that have so many tokens, each counted once."""
    choices = [_choice(number, each.text, each) for number, each in enumerate(completions)]
    written = sum(each.tokens for each in completions)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}
    return json.dumps({**head, "choices": choices, "usage": usage}).encode()


def piece_event(head: Mapping[str, Any], number: int, text: str, finished: Completion | None = None) -> bytes:
    """Return an event with a piece of one completion, and at its end the reason why it ends."""
    return b"data: %b\n\n" % json.dumps({**head, "choices": [_choice(number, text, finished)]}).encode()


STREAM_END = b"data: [DONE]\n\n"
"""The last event of a stream."""


def _choice(number: int, text: str, finished: Completion | None) -> dict[str, Any]:
    reason = None if finished is None else "stop" if finished.is_stopped else "length"
    return {"index": number, "text": text, "logprobs": None, "finish_reason": reason}
