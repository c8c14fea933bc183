"""Text for language models, and MNIST: where data comes from, its vocabulary, and how it is cut into batches.

corpus = load_corpus()          # WikiText-2, or the embedded corpus where it cannot be had
stream = SegmentStream(corpus.train, batch_size=4, seq_len=64, shard=0, num_shards=8, seed=0)
batch = next(stream)            # tokens, targets and mask [4, 64], is_first [4]
"""

from dmoe_jax.data.batches import Batch, SegmentStream, evaluation_segments
from dmoe_jax.data.corpora import Corpus, load_corpus
from dmoe_jax.data.files import DataError
from dmoe_jax.data.mnist import Images, Mnist, load_mnist, read_mnist
from dmoe_jax.data.pieces import PieceVocabulary
from dmoe_jax.data.saved_vocabulary import load_vocabulary, save_vocabulary
from dmoe_jax.data.vocabulary import Vocabulary, unigram_perplexity

__all__ = [
    "Batch",
    "Corpus",
    "DataError",
    "Images",
    "Mnist",
    "PieceVocabulary",
    "SegmentStream",
    "Vocabulary",
    "evaluation_segments",
    "load_corpus",
    "load_mnist",
    "load_vocabulary",
    "read_mnist",
    "save_vocabulary",
    "unigram_perplexity",
]
