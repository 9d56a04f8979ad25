"""Recurrent models that go wrong."""

from realistic.sequences import lstm_tagger, seq2seq_attention
from realistic.trials import Watch, failing


@failing(
    "the tokenizer gives one id for all words",
    names=("representation_collapse", "not_learning"),
    trace=True,
)
def lstm_tagger_one_token(watch: Watch) -> float:
    return lstm_tagger(watch, unknown=True)


@failing("the learning rate is 100 times too high", names=("lr_too_high",), trace=True)
def lstm_tagger_lr_x100(watch: Watch) -> float:
    return lstm_tagger(watch, lr=0.5)


@failing("attention's softmax runs over the batch", names=("softmax_dim",), trace=True)
def seq2seq_softmax_over_batch(watch: Watch) -> float:
    return seq2seq_attention(watch, softmax_dim=0)
