"""Hostile bytes have one error: 200,000 damaged streams through reader, message parser and session.

Each stream is legal at first: small and large frames, every message, every compression, into a session that is in the
middle of things. Then it is damaged. That the damage reaches every layer is measured: each place in the wire modules
that refuses something must have done so, or this test would prove nothing.
"""

import ast
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from dmoe_net.errors import RemoteProtocolError, VersionMismatch
from dmoe_net.identity import PeerId
from dmoe_net.rpc.session import RpcSession
from dmoe_net.wire import codec, frame_reader, messages, tensors
from dmoe_net.wire.frame_reader import FrameReader
from tests.net.wire_damage import FLOATS, damaged_stream

NUM_INPUTS = 20_000
WINDOW_BYTES = 2**20
MAX_INPUT_S = 1.0
"""Seconds of processor time that one input may take: a hundred times the slowest; noise does not reach it."""


def busy_session() -> RpcSession:
    """A call of ours has left, a second one will after Hello: answers to both are legal, and so is some credit."""
    peer_id, window_bytes = PeerId(b"\x01" * 32), frame_reader.WINDOW_BYTES
    hello = messages.Hello(peer_id=peer_id, instance=bytes(8), port=None, window_bytes=window_bytes)
    session = RpcSession(hello)
    session.place_call("m", {}, (), timeout_s=1.0)
    session.take_parts(2**20)
    session.place_call("m", {}, (FLOATS,), timeout_s=1.0)
    return session


def feed(data: bytes, cut: int) -> int:
    """Number of frames that get through when a connection receives bytes, `cut` at a time; it answers calls at once."""
    reader, session = FrameReader(window_bytes=WINDOW_BYTES), busy_session()
    num_frames = start = 0
    while start < len(data):
        buffer = reader.buffer()
        nbytes = min(buffer.nbytes, len(data) - start, cut)
        buffer[:nbytes] = data[start : start + nbytes]
        reader.received(nbytes)
        start += nbytes
        while (frame := reader.next_frame_untrusted()) is not None:
            action = session.receive_untrusted(frame)
            num_frames += 1
            if isinstance(action, messages.CallStart):
                session.reply(action.call_id, {}, action.tensors)
            session.take_parts(2**20)
    return num_frames


def refusal_site(error: BaseException) -> str:
    """Place where an error was raised: "module:line"."""
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return f"{Path(traceback.tb_frame.f_code.co_filename).stem}:{traceback.tb_lineno}"


def run(rng: random.Random) -> tuple[Counter[str], float]:
    """Feed `NUM_INPUTS` damaged streams.

    Returns:
      how many were accepted or refused where, and the longest time that one took, in seconds of processor time.
    """
    outcomes: Counter[str] = Counter()
    slowest_s = 0.0
    for _ in range(NUM_INPUTS):
        data = damaged_stream(rng)
        cut = 1 + rng.randrange(300) if len(data) < 5000 and rng.random() < 0.2 else 2**20
        started_s = time.thread_time()
        try:
            num_frames = feed(data, cut)
            outcomes["accepted" if num_frames > 1 else "silence"] += 1
        except (RemoteProtocolError, VersionMismatch) as error:
            outcomes[refusal_site(error)] += 1
        slowest_s = max(slowest_s, time.thread_time() - started_s)
    return outcomes, slowest_s


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 10))])
def test_damaged_streams_have_one_error(block: int) -> None:
    """Frames, silence, or RemoteProtocolError, never for long; damage gets to every layer and every refusal in it."""
    outcomes, slowest_s = run(random.Random(block))
    assert slowest_s < MAX_INPUT_S
    layers = Counter[str]()
    for site, count in outcomes.items():
        layers[site.split(":")[0]] += count
    for layer in ("accepted", "frame_reader", "codec", "tensors", "messages", "session"):
        assert layers[layer] > 0.02 * NUM_INPUTS, layers
    assert refusals() - outcomes.keys() == set()


OUT_OF_REACH = (
    "CBOR item of",  # the reader has checked the length of the header already,
    "body has {body.nbytes}",  # and that of the body;
    "still open since",  # this one would need 2**32 streams
)


def refusals() -> set[str]:
    """Every `raise RemoteProtocolError` on the way of a frame that damage can reach, as "module:line"."""
    sites = set()
    for module in (frame_reader, codec, tensors, messages):
        path = Path(module.__file__)
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node)
            if isinstance(node, ast.Raise) and "RemoteProtocolError" in text and not any(map(text.count, OUT_OF_REACH)):
                sites.add(f"{path.stem}:{node.lineno}")
    return sites
