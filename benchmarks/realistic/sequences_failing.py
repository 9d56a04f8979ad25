"""Recurrent models that go wrong."""

from torch import nn

from realistic.sequences import ctc_speech, lstm_addition, lstm_tagger, seq2seq_attention
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


@failing("the learning rate is 40 times too low", names=("lr_too_low",), trace=True)
def seq2seq_lr_per_40(watch: Watch) -> float:
    return seq2seq_attention(watch, lr=1.25e-4)


@failing("CTC gets logits, not log-probabilities", names=("below_zero",), trace=True)
def ctc_no_log_softmax(watch: Watch) -> float:
    return ctc_speech(watch, log_softmax=False)


@failing("the learning rate is 100 times too low", names=("lr_too_low",), trace=True)
def ctc_lr_per_100(watch: Watch) -> float:
    return ctc_speech(watch, lr=5e-5)


@failing("a plain tanh RNN forgets over time", names=("vanishing",), trace=False)
def lstm_addition_plain_rnn(watch: Watch) -> float:
    return lstm_addition(watch, cell=nn.RNN)


@failing(
    "an RNN of ReLUs at a high learning rate, not clipped",
    names=("exploding", "lr_too_high"),
    trace=True,
)
def lstm_addition_relu_rnn_unclipped(watch: Watch) -> float:
    return lstm_addition(watch, cell=nn.RNN, nonlinearity="relu", lr=5e-2, clip=1e9)


@failing("gradients are clipped at a norm of 1e-8", names=("clipping",), trace=True)
def lstm_addition_clip_1e_8(watch: Watch) -> float:
    return lstm_addition(watch, clip=1e-8)
