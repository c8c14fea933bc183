"""Text for language models: where it comes from, its vocabulary, and how it is cut into batches. And MNIST.

corpus = load_corpus()          # `corpora`: WikiText-2, or the embedded corpus where it cannot be had
stream = SegmentStream(corpus.train, batch_size=4, seq_len=64, shard=0, num_shards=8, seed=0)      # `batches`
batch = next(stream)            # tokens, targets and mask [4, 64], is_first [4]
"""


class DataError(ValueError):
    """A file is missing, damaged or not the text it should be. The message names it and what was expected."""
