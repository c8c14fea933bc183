"""For which numbers of rows programs are compiled."""

import math


def bucket_of(rows: int, parts: int = 1) -> int:
    """Programs are compiled for these numbers of rows: the next power of two, of rows in each of so many parts."""
    if rows < 1:
        raise ValueError(f"a batch has at least one row, got {rows}")
    return parts << (math.ceil(rows / parts) - 1).bit_length()


def buckets_up_to(max_rows: int, parts: int = 1) -> tuple[int, ...]:
    """Every bucket that batches of 1..max_rows rows can fall into, ascending."""
    return tuple(parts << power for power in range((bucket_of(max_rows, parts) // parts).bit_length()))
