"""How an experiment of several processes begins and ends: signals, one-line errors, exit status."""

from collections.abc import Awaitable, Callable

from dmoe_jax.cli.lifecycle import EXIT_INTERRUPTED, MISTAKES, Stop, run_until_done

__all__ = ["EXIT_INTERRUPTED", "run_supervised"]


def run_supervised(main: Callable[[], Awaitable[int]], *, prog: str) -> int:
    """Run an experiment until it is done or a signal arrives, which cancels it; returns the exit status.

    A process that failed and a wrong value end this process with one line.

    Args:
      main: the experiment. Cancelled, it ends the processes that it started.
      prog: what its messages begin with.
    """

    def run(stop: Stop) -> Awaitable[int]:
        del stop  # it has no body: the first signal cancels everything
        return main()

    return run_until_done(run, prog=prog, mistakes=(*MISTAKES, ValueError, OSError))
