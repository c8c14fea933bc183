"""Text for language models: where it comes from, its vocabulary, and how it is cut into batches. And MNIST.

corpus = load_corpus()          # `corpora`: WikiText-2, or the embedded corpus where it cannot be had
stream = SegmentStream(corpus.train, batch_size=4, seq_len=64, shard=0, num_shards=8, seed=0)      # `batches`
batch = next(stream)            # tokens, targets and mask [4, 64], is_first [4]
"""

from pathlib import Path

SOURCES = ("auto", "wikitext-2", "embedded")
"""Texts that have a name: WikiText-2 if it can be had and else the embedded one, or one of the two only."""


class DataError(ValueError):
    """A file is missing, damaged or not the text it should be. The message names it and what was expected."""


def check_source(source: str) -> None:
    """Check that a text can be meant: one of `SOURCES`, or the path of a text of one's own.

    Raises:
      DataError: there is no file or folder of this name.
    """
    if source not in SOURCES and not Path(source).exists():
        raise DataError(f"--data {source}: there is no such file or folder; expected one, or {', '.join(SOURCES)}")
