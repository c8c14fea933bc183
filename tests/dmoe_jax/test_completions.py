"""OpenAI's completions: what a stranger may ask for, where a text ends, and the answers over HTTP."""

import json
from typing import Any

import pytest
import trio
import trio.testing

from dmoe_jax.trained import completion_server
from dmoe_jax.trained.completion_server import open_completions
from dmoe_jax.trained.completions import (
    Completion,
    CompletionError,
    CompletionLimits,
    CompletionRequest,
    completion_request_untrusted,
)
from dmoe_jax.trained.language_model import AsyncTrainedModel
from dmoe_jax.trained.settings import Sampling
from dmoe_net.errors import NoQuorum
from dmoe_net.identity import Address
from tests.dmoe_jax.http_client import ask, fetch
from tests.dmoe_jax.test_trained_model import make_model

LIMITS = CompletionLimits(most_words=50, most_prompts=4, most_characters=100)


def read(body: Any, limits: CompletionLimits = LIMITS) -> CompletionRequest:
    return completion_request_untrusted(json.dumps(body).encode(), limits, seed=7)


def test_what_is_not_said_is_as_at_openai() -> None:
    """16 tokens at temperature 1, in one piece; the seed is the server's."""
    assert read({"prompt": "a"}) == CompletionRequest(
        prompts=("a",), number=1, words=16, sampling=Sampling(seed=7), stop=(), streams=False
    )
    assert read({}).prompts == ("",)


def test_all_fields_are_read() -> None:
    """Two prompts of tokens, twice each; nulls are as if nothing was said."""
    body = {"model": "x", "prompt": [[1, 2], "b"], "n": 2, "max_tokens": 3, "temperature": 0, "top_p": 0.5, "top_k": 4}
    more = {
        "seed": 1,
        "stop": ["\n", "end"],
        "stream": True,
        "user": "u",
        "logprobs": None,
        "echo": False,
        "suffix": "",
    }
    found = read(body | more)
    assert found.prompts == ((1, 2), (1, 2), "b", "b")
    assert found.sampling == Sampling(temperature=0.0, top_p=0.5, top_k=4, seed=1)
    assert (found.words, found.stop, found.streams) == (3, ("\n", "end"), True)
    assert read({"prompt": [1, 2]}).prompts == ((1, 2),)
    assert read({"prompt": "a", "stop": "x", "max_tokens": None}).stop == ("x",)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ([1], "expected a JSON object, got list", None),
        ({"prompt": {}}, "prompt must be a text, tokens, or a list", "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt must be", "prompt"),
        ({"prompt": [1, True]}, "prompt must be", "prompt"),
        ({"prompt": "a" * 101}, "at most 100, got 101", "prompt"),
        ({"prompt": ["a"] * 3, "n": 2}, "at most 4 completions at once, got 3 x 2", None),
        ({"max_tokens": 51}, "max_tokens must be an integer from 1 to 50, got 51", "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer", "max_tokens"),
        ({"n": True}, "n must be an integer", "n"),
        ({"temperature": -1}, "temperature must be finite and not negative, got -1", "temperature"),
        ({"temperature": "hot"}, "temperature must be a number", "temperature"),
        ({"temperature": 10**400}, "int too large", None),
        ({"top_p": 0}, "top_p must be above 0", "top_p"),
        ({"seed": 2**64}, "seed must be an integer", "seed"),
        ({"stop": ["a"] * 5}, "stop must be a text or up to 4", "stop"),
        ({"stop": [""]}, "a stop is a text of 1 to 256 characters", "stop"),
        ({"stream": "yes"}, "stream must be true or false", "stream"),
        ({"logprobs": 5}, "logprobs is not served here", "logprobs"),
        ({"echo": True}, "echo is not served here", "echo"),
        ({"messages": []}, "messages is not served here", "messages"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(body: Any, message: str, param: str | None) -> None:
    """The answer says what was expected, in the form that clients read."""
    with pytest.raises(CompletionError, match=message) as error:
        read(body)
    if param is not None:
        assert json.loads(error.value.body())["error"]["param"] == param


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}'], ids=len)
def test_no_json_is_an_error(body: bytes) -> None:
    """A lone surrogate is JSON, and a prompt that no vocabulary has to understand."""
    if b"ud800" in body:
        assert completion_request_untrusted(body, LIMITS, seed=0).prompts == ("\ud800",)
    else:
        with pytest.raises(CompletionError, match="expected a JSON object"):
            completion_request_untrusted(body, LIMITS, seed=0)


def test_a_text_ends_before_its_stop() -> None:
    """Over several pieces; what may be its beginning is held back until it is not."""
    completion = Completion(["end.", "\n"])
    assert [completion.add(piece) for piece in ("an e", "n", "emy e", "nd", ".more", "x")] == [
        "an ", "", "enemy ", "", "", ""
    ]  # fmt: skip
    assert (completion.text, completion.is_stopped, completion.end()) == ("an enemy ", True, "")
    other = Completion(["end."])
    assert (other.add("the en"), other.end(), other.is_stopped) == ("the ", "en", False)
    assert Completion([]).add("all") == "all"


def post(body: Any) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


def serving(limits: CompletionLimits = LIMITS, **options: Any) -> Any:
    model = make_model().under_trio()
    return open_completions(Address("127.0.0.1", 0), model, name="small", limits=limits, **{"at_once": 1, **options})


async def test_completions_are_what_the_model_writes() -> None:
    """Greedy, two prompts, and the counts."""
    expected = make_model().generate(["w1 w2", "w3"], words=5, temperature=0.0)
    async with serving() as address:
        status, body = await ask(address, post({"prompt": ["w1 w2", "w3"], "max_tokens": 5, "temperature": 0}))
        assert status == 200
        told = json.loads(body)
        assert [choice["text"] for choice in told["choices"]] == [each.text for each in expected]
        assert {choice["finish_reason"] for choice in told["choices"]} == {"length"}
        assert told["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
        _, body = await ask(address, post({"prompt": ["w1 w2", "w3"], "n": 2, "max_tokens": 5}))
        assert json.loads(body)["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
        assert told["model"] == json.loads((await fetch(address, "/v1/models"))[1])["data"][0]["id"] == "small"
        status, body = await ask(address, post({"prompt": [40]}))
        assert (status, json.loads(body)["error"]["param"]) == (400, "prompt")


async def test_a_stream_tells_each_piece() -> None:
    """The pieces make up the text; the last event of each says why it ends, and one more that all is over."""
    (expected,) = make_model().generate(["w1"], words=6, temperature=0.0)
    first = expected.text.split()[0]
    async with serving() as address:
        asked = {"prompt": "w1", "max_tokens": 6, "temperature": 0, "stream": True}
        status, body = await ask(address, post(asked))
        events = [line for line in body.decode().splitlines() if line.startswith("data: ")]
        assert (status, events[-1]) == (200, "data: [DONE]")
        choices = [json.loads(event[6:])["choices"][0] for event in events[:-1]]
        assert "".join(choice["text"] for choice in choices) == expected.text
        assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["length"]
        status, body = await ask(address, post({**asked, "stop": first}))
        assert b'"finish_reason": "stop"' in body
        assert first.encode() not in body


async def test_a_client_that_leaves_ends_its_completion() -> None:
    """One request at a time: the next one is answered at once, though the first would take a thousand words."""
    asked = {"prompt": "w1", "max_tokens": 100_000, "temperature": 0}
    limits = CompletionLimits(most_words=100_000)
    async with serving(limits) as address:
        for streams in (False, True):
            async with await trio.open_tcp_stream(address.host, address.port) as stream:
                await stream.send_all(post({**asked, "stream": streams}))
                if streams:  # else it leaves at once
                    assert b"200" in await stream.receive_some()
            with trio.fail_after(120):  # it may compile
                status, _ = await ask(address, post({**asked, "max_tokens": 1}))
            assert status == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [(b"Host: evil.example", 421), (b"Host: localhost:80\r\nOrigin: https://evil.example", 403), (b"Host: [::1]", 200)],
)
async def test_pages_of_other_sites_get_nothing(header: bytes, status: int) -> None:
    """Neither by a name that leads here, nor by a request across sites."""
    async with serving() as address:
        assert (await ask(address, b"GET /v1/models HTTP/1.1\r\n%b\r\n\r\n" % header))[0] == status


CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
PATHS = "there is no such page; this server has POST /v1/completions and GET /v1/models"


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        (CHAT, 404, PATHS),
        (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405, "expected POST"),
        (b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", 405, "expected GET or HEAD"),
        (b"POST /v1/completions HTTP/1.1\r\n\r\n", 411, "expected a body with a Content-Length"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413, "expected a body of at most"),
        (b"GET /v1/models HTTP/1.1\r\nX: %b" % (b"a" * 20_000), 431, "expected an HTTP/1.1 request"),
        (b"nonsense\r\n\r\n", 400, "expected an HTTP/1.1 request"),
        (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421, "expected this server's address"),
        (post([1]), 400, "expected a JSON object, got list"),
        (post({"prompt": "w1", "temperature": 0.5}), 500, "the page could not be made"),
        (post({"prompt": "w1", "temperature": 0.25}), 503, "no expert"),
    ],
)
async def test_every_error_has_the_form_that_clients_read(
    request_: bytes, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a page is found, of the page, and of what the model met, which is a bug or the swarm's."""

    async def generate(self: Any, prompts: Any, *, temperature: float, **settings: Any) -> None:
        raise ZeroDivisionError if temperature == 0.5 else NoQuorum("no expert")

    monkeypatch.setattr(AsyncTrainedModel, "generate", generate)
    async with serving() as address:
        found, body = await ask(address, request_)
    error = json.loads(body)["error"]
    assert (found, error["message"][: len(message)]) == (status, message)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert error == {"message": error["message"], "type": kind, "param": None, "code": None}


async def test_a_client_too_many_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same form, with a status after which clients ask again."""
    monkeypatch.setattr(completion_server, "MAX_CLIENTS", 1)
    async with serving() as address, await trio.open_tcp_stream(address.host, address.port):
        await trio.testing.wait_all_tasks_blocked()
        status, body = await ask(address, post({"prompt": "w1"}))
        assert (status, json.loads(body)["error"]["message"]) == (503, "clients at once are at most 1: ask again")


def test_no_more_completions_than_tokens() -> None:
    """However many its operator allows, a request makes none that its tokens do not suffice for."""
    limits = CompletionLimits(most_prompts=10**12, most_tokens=100)
    assert read({"n": 100}, limits).number == 100
    with pytest.raises(CompletionError, match="at most 100 completions at once, got 1 x 1000000000"):
        read({"n": 10**9}, limits)
