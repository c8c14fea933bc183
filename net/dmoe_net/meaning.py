"""Texts that say what numbers mean beyond their names and shapes, for peers and files to compare.

A text has a fact a line, such as "vocabulary: 33,278 words, 5c31d0f2a9b4e870". An empty text says nothing.
"""

MAX_MEANING_CHARACTERS = 2000


def check_meaning(meaning: str) -> str:
    """Return the text; ValueError if it is no meaning."""
    if not is_meaning(meaning):
        raise ValueError(
            f"a meaning is a text of at most {MAX_MEANING_CHARACTERS} printable characters, got {meaning!r:.80}"
        )
    return meaning


def is_meaning(value: object) -> bool:
    """True for a text of at most `MAX_MEANING_CHARACTERS` characters whose lines can be printed."""
    return type(value) is str and len(value) <= MAX_MEANING_CHARACTERS and all(map(str.isprintable, value.split("\n")))


def differing(theirs: str, ours: str) -> tuple[str, str]:
    """(the facts that `theirs` alone has, the facts that `ours` alone has), each as one text; "nothing" for none."""
    own, others = ours.splitlines(), theirs.splitlines()
    return (
        "; ".join(fact for fact in others if fact not in own) or "nothing",
        "; ".join(fact for fact in own if fact not in others) or "nothing",
    )


def contradiction(theirs: str, ours: str) -> tuple[str, str] | None:
    """Return what `differing` does of two meanings; None if they are equal or one says nothing, which fits all."""
    return differing(theirs, ours) if theirs and ours and theirs != ours else None
