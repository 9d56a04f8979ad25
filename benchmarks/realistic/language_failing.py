"""Language models that go wrong."""

from realistic.language import char_gpt, llama_chars, word_gpt_muon
from realistic.trials import Watch, failing


@failing("the learning rate is 100 times too high", names=("lr_too_high",), trace=True)
def char_gpt_lr_x100(watch: Watch) -> float:
    return char_gpt(watch, lr=0.6)


@failing("the learning rate is 1000 times too low", names=("lr_too_low",), trace=True)
def char_gpt_lr_per_1000(watch: Watch) -> float:
    return char_gpt(watch, lr=6e-6)


@failing("weights begin with std 1 instead of 0.02", names=("bad_init", "initial_loss"), trace=True)
def char_gpt_init_std_1(watch: Watch) -> float:
    return char_gpt(watch, std=1.0)


@failing("gradients are clipped at a norm of 1e-7", names=("clipping",), trace=True)
def char_gpt_clip_1e_7(watch: Watch) -> float:
    return char_gpt(watch, clip=1e-7)


@failing("attention has no causal mask: the model sees its targets", names=(), trace=False)
def llama_chars_no_causal_mask(watch: Watch) -> float:
    return llama_chars(watch, causal=False)


@failing("targets are not shifted: the model predicts its input", names=(), trace=False)
def char_gpt_targets_not_shifted(watch: Watch) -> float:
    return char_gpt(watch, shift=0)


@failing("zero_grad is forgotten", names=("grads_pile_up",), trace=True)
def char_gpt_no_zero_grad(watch: Watch) -> float:
    return char_gpt(watch, zero=False)


@failing("dropout of 0.8 everywhere", names=("dropout",), trace=True)
def char_gpt_dropout_80(watch: Watch) -> float:
    return char_gpt(watch, dropout=0.8)


@failing("weight decay is 10", names=("weight_decay",), trace=True)
def char_gpt_weight_decay_10(watch: Watch) -> float:
    return char_gpt(watch, decay=10.0)


@failing("Adam's epsilon is 1", names=("lr_too_low",), trace=True)
def char_gpt_adam_eps_1(watch: Watch) -> float:
    return char_gpt(watch, eps=1.0)


@failing("the same two batches again and again", names=("repeated_data", "overfit"), trace=True)
def char_gpt_two_batches(watch: Watch) -> float:
    return char_gpt(watch, n_batches=2)


@failing("Adam's first beta is 0.999", names=("momentum",), trace=True)
def char_gpt_beta1_999(watch: Watch) -> float:
    return char_gpt(watch, betas=(0.999, 0.9999))


@failing("softmax before cross_entropy", names=("probabilities",), trace=True)
def char_gpt_softmax_twice(watch: Watch) -> float:
    return char_gpt(watch, probs=True)


@failing("attention's softmax runs over queries", names=("softmax_dim",), trace=True)
def char_gpt_softmax_over_queries(watch: Watch) -> float:
    return char_gpt(watch, softmax_dim=-2)


@failing("the blocks are not in the optimizer", names=("unmoved",), trace=True)
def char_gpt_blocks_not_in_optimizer(watch: Watch) -> float:
    return char_gpt(watch, frozen="blocks")


@failing(
    "attention is not scaled, and queries and keys begin large",
    names=("attention_logits", "bad_init"),
    trace=True,
)
def llama_chars_unscaled_attention(watch: Watch) -> float:
    return llama_chars(watch, scale=1.0, q_std=1.0)


@failing(
    "all of it in float16, with Adam's epsilon of 1e-8",
    names=("non_finite", "fp16_underflow"),
    trace=True,
)
def llama_chars_half(watch: Watch) -> float:
    return llama_chars(watch, half=True, steps=60)


@failing("Muon's learning rate is 100 times too high", names=("lr_too_high",), trace=True)
def word_gpt_muon_lr_x100(watch: Watch) -> float:
    return word_gpt_muon(watch, muon_lr=2.0)
