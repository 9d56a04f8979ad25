"""Language models that go wrong."""

from realistic.language import char_gpt, llama_chars
from realistic.trials import Watch, failing


@failing("the learning rate is 100 times too high", names=("lr_too_high",), trace=True)
def char_gpt_lr_x100(watch: Watch) -> float:
    return char_gpt(watch, lr=0.6)


@failing("the learning rate is 1000 times too low", names=("lr_too_low",), trace=True)
def char_gpt_lr_per_1000(watch: Watch) -> float:
    return char_gpt(watch, lr=6e-6)


@failing("attention has no causal mask: the model sees its targets", names=(), trace=False)
def llama_chars_no_causal_mask(watch: Watch) -> float:
    return llama_chars(watch, causal=False)


@failing("dropout of 0.8 everywhere", names=("dropout",), trace=True)
def char_gpt_dropout_80(watch: Watch) -> float:
    return char_gpt(watch, dropout=0.8)


@failing("Adam's epsilon is 1", names=("lr_too_low",), trace=True)
def char_gpt_adam_eps_1(watch: Watch) -> float:
    return char_gpt(watch, eps=1.0)


@failing("the same two batches again and again", names=("repeated_data", "overfit"), trace=True)
def char_gpt_two_batches(watch: Watch) -> float:
    return char_gpt(watch, n_batches=2)
