"""What goes wrong with the sequences of `fresh_sequences` and `fresh_sessions`."""

from .fresh_sequences import (
    masked_words,
    nbeats_sales,
    sorting_transformer,
    tcn_sounds,
    text_cnn,
    wavenet_classes,
)
from .fresh_sessions import (
    sasrec_sessions,
    td_walk,
)
from .trials import Watch, failing


@failing(
    "weights begin 20 times too small, without shortcuts",
    names=("bad_init", "vanishing"),
    trace=True,
)
def tcn_sounds_small_init(watch: Watch) -> float:
    return tcn_sounds(watch, gain=0.05)


@failing("dropout of 0.95 in each layer", names=("dropout",), trace=True)
def tcn_sounds_dropout(watch: Watch) -> float:
    return tcn_sounds(watch, rate=0.95)


@failing("sounds come sorted by their class", names=("unshuffled",), trace=True)
def tcn_sounds_sorted(watch: Watch) -> float:
    return tcn_sounds(watch, in_order=True)


@failing("sounds as 16-bit numbers to 32767", names=("input_scale",), trace=True)
def wavenet_classes_int16(watch: Watch) -> float:
    return wavenet_classes(watch, unit=32767.0)


@failing("padded on both sides: the net hears the sample it predicts", names=(), trace=False)
def wavenet_classes_not_causal(watch: Watch) -> float:
    return wavenet_classes(watch, both_sides=True)


@failing("the padding mask is inverted", names=("non_finite",), trace=True)
def sorting_transformer_mask(watch: Watch) -> float:
    return sorting_transformer(watch, keep=True)


@failing("norms after the blocks, a high rate, and no warm-up", names=("lr_too_high",), trace=True)
def sorting_transformer_no_warm_up(watch: Watch) -> float:
    return sorting_transformer(watch, norm_first=False, warm=0, lr=0.02)


@failing("errors divided by targets that may be near 0", names=("spikes", "exploding"), trace=True)
def nbeats_sales_percent(watch: Watch) -> float:
    return nbeats_sales(watch, percent=True)


@failing("weights and biases begin 3 times too large", names=("exploding", "bad_init"), trace=True)
def nbeats_sales_init_x3(watch: Watch) -> float:
    return nbeats_sales(watch, gain=3.0)


@failing("view instead of transpose: letters and channels are mixed", names=(), trace=False)
def text_cnn_view(watch: Watch) -> float:
    return text_cnn(watch, transposed=False)


@failing("a learning rate of 2 with Adam", names=("lr_too_high",), trace=True)
def text_cnn_lr_x1000(watch: Watch) -> float:
    return text_cnn(watch, lr=2.0)


@failing("a warm-up of 30000 steps in a run of 200", names=("lr_too_low",), trace=True)
def masked_words_warm_up(watch: Watch) -> float:
    return masked_words(watch, warm=30000)


@failing("tied embeddings begin with a std of 1", names=("bad_init", "initial_loss"), trace=True)
def masked_words_std_1(watch: Watch) -> float:
    return masked_words(watch, std=1.0)


@failing("gradients are clipped at a norm of 1e-5", names=("clipping",), trace=True)
def sasrec_sessions_clip_1e5(watch: Watch) -> float:
    return sasrec_sessions(watch, clip=1e-5)


@failing(
    "next(iter(loader)) in each step: always the first batch", names=("repeated_data",), trace=True
)
def sasrec_sessions_first_batch(watch: Watch) -> float:
    return sasrec_sessions(watch, first_only=True)


@failing(
    "a discount of 1.1: values grow without end", names=("exploding", "not_learning"), trace=True
)
def td_walk_discount(watch: Watch) -> float:
    return td_walk(watch, gamma=1.1)


@failing("the end of a walk is taken for a state like any other", names=(), trace=False)
def td_walk_no_ends(watch: Watch) -> float:
    return td_walk(watch, ends=False)
