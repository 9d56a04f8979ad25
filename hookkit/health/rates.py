"""How often each rule was right in trainings of the kinds that people run: measured, not chosen.

Written by `python benchmarks/verdicts.py --runs DIR --half all --write`, which says what counts.
"""

RATES: dict[str, tuple[int, int]] = {
    "ascent": (1, 0),
    "bad_init": (21, 0),
    "below_zero": (5, 1),
    "broadcast": (9, 0),
    "clipping": (9, 0),
    "constant_init": (1, 0),
    "constant_input": (5, 0),
    "dead": (4, 0),
    "dropout": (7, 0),
    "eval_mode": (0, 1),
    "exploding": (4, 0),
    "fp16_underflow": (1, 0),
    "grads_pile_up": (10, 0),
    "initial_loss": (3, 2),
    "input_scale": (25, 0),
    "lr_too_high": (37, 6),
    "lr_too_low": (25, 1),
    "momentum": (3, 0),
    "no_gradient": (7, 0),
    "non_finite": (15, 0),
    "not_in_optimizer": (15, 0),
    "not_learning": (7, 5),
    "probabilities": (10, 4),
    "representation_collapse": (6, 0),
    "saturated": (1, 0),
    "small_batch": (2, 0),
    "softmax_dim": (8, 0),
    "target_scale": (12, 0),
    "unmoved": (4, 0),
    "unshuffled": (6, 0),
    "vanishing": (2, 1),
    "weight_decay": (10, 0),
    "zero_gradient": (6, 0),
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
