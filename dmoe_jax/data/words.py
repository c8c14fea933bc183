"""A text as words, and back: word level, as the papers' figures are.

A text that holds `<unk>` has been made into words by others, as WikiText-2 has been: it is taken as it is, so that
perplexities can be compared with published ones. Any other text is cut here.
"""

import re
import unicodedata
from collections.abc import Iterable

EOS = "<eos>"
"""Ends every line of a text; one token, counted in perplexity, as in every published WikiText-2 figure."""

UNK = "<unk>"
"""Stands for every word outside the vocabulary."""

_UNSPACED = (
    "\u0e01-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
"""Characters of scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese. Each is a
token by itself, with the marks that belong to it."""

_JOINERS = "\u200c\u200d"
"""Inside words of Persian and of Indian languages."""


def cut_words(text: str, *, is_tokenised: bool) -> list[str]:
    """The words of a text, with `<eos>` where a line ends; a last line without a line feed has none.

    Those of a tokenised text lie between its spaces, with `<eos>` for each line feed, also of a blank line; a line that
    ends in `<eos>` gets no second one.
    """
    if not is_tokenised:
        return tokenise(text)
    if EOS in text:
        text = re.sub(rf"{EOS}[ \t]*\n", "\n", text)
    return text.replace("\n", f" {EOS} ").split()


def join_words(words: Iterable[str]) -> str:
    """A text of these words: one space between two of a line, and a line feed for each `<eos>`."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word == EOS:
            lines.append([])
        else:
            lines[-1].append(word)
    return "\n".join(map(" ".join, lines))


def tokenise(text: str) -> list[str]:
    """Lower-case words, numbers and punctuation, with `<eos>` after each line that has ended and is not blank.

    Letters and the marks on them are composed (Unicode's form NFC), so that it does not matter how they were typed.
    """
    text = unicodedata.normalize("NFC", text.lower())
    pattern = _pattern(text)
    words: list[str] = []
    *lines, last = text.split("\n")
    for line in lines:
        found = [match.group() for match in pattern.finditer(line)]
        if found:
            words += found if found[-1] == EOS else [*found, EOS]
    return words + [match.group() for match in pattern.finditer(last)]


def _pattern(text: str) -> re.Pattern[str]:
    """One token: `<unk>` or `<eos>`; a character of a script without spaces; a word or identifier (with an inner
    apostrophe); a number; or a run of one punctuation mark (`>>>`)."""
    # Marks that are composed with no letter. `re` knows no class of them, and their list is long.
    marks = "".join(sorted(char for char in set(text) if unicodedata.category(char).startswith("M"))) + _JOINERS
    word = rf"(?:[^\W\d{_UNSPACED}]+[{marks}]*)+"
    return re.compile(rf"{UNK}|{EOS}|(?!\d)[{_UNSPACED}][{marks}]*|{word}(?:['’]{word})?|\d+|([^\w\s])\1*")
