"""Claims of a peer cost nothing: memory is taken for bytes that came, not for lengths that were announced."""

import sys
import tracemalloc
from pathlib import Path

import pytest

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.wire.codec import encode
from dmoe_net.wire.frame_reader import FrameReader
from dmoe_net.wire.frames import MAX_BODY_BYTES, MAX_HEADER_BYTES
from tests.net.wire_parts import KIB, OPEN, WHOLE, bytes_header, chunk, opening, preamble, read


def _traced_peak(reader: FrameReader, data: bytes) -> int:
    """The most memory that `reader` allocates while it is fed `data`, in bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            read(data, reader=reader)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        preamble(OPEN, 16, MAX_BODY_BYTES + 1),
        preamble(OPEN, 16, 2**64 - 1),
        preamble(WHOLE, 16, MAX_BODY_BYTES),
        preamble(WHOLE, 2**32 - 1, 0),
        preamble(OPEN, len(bytes_header(MAX_BODY_BYTES - 1)), MAX_BODY_BYTES) + bytes_header(MAX_BODY_BYTES - 1),
        preamble(WHOLE, len(bytes_header(2**39)), 1) + bytes_header(2**39),
    ],
    ids=["body", "huge body", "whole body", "header", "table below the body", "table above the body"],
)
def test_refused_lengths_allocate_nothing(data: bytes) -> None:
    """A length beyond a limit, or one that the table does not confirm, costs what its error message costs."""
    read(opening(0, kind=WHOLE) + opening(5, kind=WHOLE) + bytes(5))  # what imports and caches take is taken
    assert _traced_peak(FrameReader(), data) < 32 * KIB


def test_a_header_that_does_not_come_takes_no_more_than_its_limit() -> None:
    """The scratch buffer grows to the largest header and stays there."""
    reader = FrameReader()
    header = encode({"a": bytes(MAX_HEADER_BYTES - 6)})
    data = preamble(WHOLE, len(header), 0) + header
    tracemalloc.start()
    try:
        read((2 * data)[:-1], sizes=(1000,), reader=reader)
        assert reader.buffer().nbytes < MAX_HEADER_BYTES
        assert tracemalloc.get_traced_memory()[0] < 2 * MAX_HEADER_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_announced_bodies_cost_no_real_memory() -> None:
    """Sixty-four bodies of 256 MiB, announced and not sent, touch less than a hundredth of their pages."""
    before = _resident_bytes()
    readers = [FrameReader() for _ in range(32)]
    for reader in readers:
        read(2 * opening(MAX_BODY_BYTES) + chunk(1, bytes(100)), reader=reader)
        assert not reader.at_boundary
    assert _resident_bytes() - before < 64 * MAX_BODY_BYTES // 100


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
