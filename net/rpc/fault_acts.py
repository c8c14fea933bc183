"""What a peer does when a fault strikes one of its answers; `net.rpc.faults` decides when."""

from collections.abc import Callable

import trio

from net.errors import CallRefused
from net.rpc.base import Reply
from net.rpc.faults import Fault
from net.wire.frames import MAGIC, PREAMBLE, VERSION, Frame, Part, PartKind
from net.wire.tensors import plain

_GARBAGE = b"HTTP/1.1 400 Bad Request\r\n\r\n"
_HEAD = PREAMBLE.pack(MAGIC, VERSION, PartKind.WHOLE, 100, 0)  # of a header of 100 bytes, which never come
_CUT_SHORT = Part(pieces=(_HEAD,), nbytes=len(_HEAD), frame=None)
_NO_FRAME = Part(pieces=(_GARBAGE,), nbytes=len(_GARBAGE), frame=Frame(header={"type": "garbage"}))
"""The frame is for a simulated link, which carries no bytes: one that is no message."""


async def act_before(fault: Fault, late_s: float) -> None:
    """What comes in place of the handler, or before it.

    Raises:
      CallRefused: for that fault.
    """
    match fault:
        case Fault.REFUSE:
            raise CallRefused("refused on purpose")
        case Fault.HANG:
            await trio.sleep_forever()
        case Fault.LATE:
            await trio.sleep(late_s)
        case Fault.DIE | Fault.GARBAGE | Fault.WRONG_SHAPE:
            pass


async def act_instead_of_reply(fault: Fault, reply: Reply, send_last: Callable[[Part], None]) -> Reply:
    """What comes in place of the handler's reply.

    Args:
      send_last: sends one more part on the connection and then ends it.
    """
    match fault:
        case Fault.DIE | Fault.GARBAGE:
            send_last(_CUT_SHORT if fault is Fault.DIE else _NO_FRAME)
            await trio.sleep_forever()  # the end of the connection ends this
        case Fault.WRONG_SHAPE:
            return Reply(body=reply.body, tensors=tuple(plain(tensor)[None] for tensor in reply.tensors))
        case Fault.REFUSE | Fault.HANG | Fault.LATE:
            pass
    return reply
