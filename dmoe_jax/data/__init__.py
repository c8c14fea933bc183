"""Text for language models: where it comes from, its vocabulary, and how it is cut into batches.

corpus = load_corpus()                                     # corpora: WikiText-2, or the embedded corpus
offline stream = SegmentStream(corpus.train, batch_size=4, seq_len=64, shard=0, num_shards=8, seed=0)      #
batches batch = next(stream)                                       # tokens, targets [4, 64], mask, is_first
"""
