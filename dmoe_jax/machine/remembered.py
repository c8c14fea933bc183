"""Objects that equal arguments share, such as compiled programs, which are not all kept for ever.

JAX knows compiled code by the identity of functions, so equal optimisers, routers or settings shall share one program.
A process that tries many settings would keep all of them, two megabytes and more for each optimiser. So of each kind
the last few are kept, and others only as long as somebody has them.
"""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

RECENT = 4
"""Number of programs of one kind that are kept although nobody has them any more."""


def remembered(most: int = RECENT) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that makes an object: equal arguments give the same one.

    A function forgets objects that nobody uses, but for the `most` that were asked for last. Python cannot tell if a
    tuple is in use: of tuples only the last ones are kept.
    """

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        recent: OrderedDict[Hashable, T] = OrderedDict()
        in_use: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()

        @functools.wraps(make)
        def found(*args: P.args, **kwargs: P.kwargs) -> T:
            key = args, tuple(sorted(kwargs.items()))
            value = recent.pop(key, in_use.get(key))
            if value is None:
                value = make(*args, **kwargs)
                if not isinstance(value, tuple):
                    in_use[key] = value
            recent[key] = value
            if len(recent) > most:
                recent.popitem(last=False)
            return value

        return found

    return decorate
