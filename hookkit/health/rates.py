"""How often each rule was right in trainings of the kinds that people run: measured, not chosen.

Written by `python benchmarks/verdicts.py --runs DIR --half all --write`, which says what counts.
"""

RATES: dict[str, tuple[int, int]] = {
    "ascent": (1, 0),
    "bad_init": (19, 0),
    "below_zero": (5, 1),
    "broadcast": (7, 0),
    "clipping": (8, 0),
    "constant_init": (1, 0),
    "constant_input": (5, 0),
    "dead": (4, 0),
    "dropout": (6, 0),
    "exploding": (4, 0),
    "fp16_underflow": (1, 0),
    "grads_pile_up": (8, 0),
    "initial_loss": (2, 1),
    "input_scale": (19, 0),
    "lr_too_high": (30, 5),
    "lr_too_low": (21, 2),
    "momentum": (3, 0),
    "no_gradient": (6, 0),
    "non_finite": (12, 0),
    "not_in_optimizer": (12, 0),
    "not_learning": (7, 3),
    "probabilities": (8, 3),
    "representation_collapse": (6, 0),
    "saturated": (1, 0),
    "small_batch": (2, 0),
    "softmax_dim": (8, 0),
    "spikes": (1, 1),
    "target_scale": (11, 0),
    "unmoved": (3, 0),
    "unshuffled": (5, 0),
    "vanishing": (2, 1),
    "weight_decay": (8, 0),
    "zero_gradient": (5, 0),
    "zero_init": (2, 0),
}
"""Rule → trainings in which its alarm came first and named the cause; those in which it did not."""

SURE = 0.8
"""From which share on a rule is "clear", by Laplace's rule of succession: of n trainings, in r of
which it was right, (r + 1) / (n + 2). So 3 of 3 are enough, 2 of 2 are not, and 8 of 9 are."""


def certainty(rule: str) -> str:
    """`"clear"` or `"likely"`: how sure the cause is that a rule names.

    >>> certainty("a rule that was never measured")
    'likely'
    """
    right, wrong = RATES.get(rule, (0, 0))
    return "clear" if (right + 1) / (right + wrong + 2) >= SURE else "likely"
