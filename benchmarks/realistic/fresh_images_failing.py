"""What goes wrong with the images of `fresh_images`."""

from torch import nn

from .fresh_images import (
    adversarial_digits,
    clip_digits,
    convnext_erasing,
    densenet_restarts,
    fixmatch_digits,
    keypoint_heatmaps,
    shapes_multilabel,
    spiking_digits,
)
from .trials import Watch, failing


@failing("a learning rate of 10 with SGD", names=("lr_too_high",), trace=True)
def densenet_restarts_lr_x100(watch: Watch) -> float:
    return densenet_restarts(watch, lr=10.0)


@failing("a learning rate of 1e-5 with SGD", names=("lr_too_low",), trace=True)
def densenet_restarts_lr_1e5(watch: Watch) -> float:
    return densenet_restarts(watch, lr=1e-5)


@failing("the augmentation erases the whole image", names=("constant_input",), trace=True)
def convnext_erasing_all(watch: Watch) -> float:
    return convnext_erasing(watch, erased=8)


@failing("a weight decay of 100 in AdamW", names=("weight_decay",), trace=True)
def convnext_erasing_decay_100(watch: Watch) -> float:
    return convnext_erasing(watch, wd=100.0)


@failing(
    "nearly all branches of blocks are dropped, the rest scaled up", names=("dropout",), trace=True
)
def convnext_erasing_drop_path(watch: Watch) -> float:
    return convnext_erasing(watch, drop=0.97)


@failing("a softmax over labels of which several are true", names=("probabilities",), trace=True)
def shapes_multilabel_softmax(watch: Watch) -> float:
    return shapes_multilabel(watch, act=nn.Softmax(1))


@failing("labels moved by one row within each batch", names=("not_learning",), trace=True)
def shapes_multilabel_rolled(watch: Watch) -> float:
    return shapes_multilabel(watch, roll=True)


@failing("a learning rate of 1 with Adam", names=("lr_too_high",), trace=True)
def keypoint_heatmaps_lr_1(watch: Watch) -> float:
    return keypoint_heatmaps(watch, lr=1.0)


@failing("each image has the next one's target", names=("not_learning",), trace=True)
def keypoint_heatmaps_next(watch: Watch) -> float:
    return keypoint_heatmaps(watch, shift=True)


@failing(
    "a ReLU after the heat map, and biases of -3 before it",
    names=("dead", "zero_gradient"),
    trace=True,
)
def keypoint_heatmaps_dead_output(watch: Watch) -> float:
    return keypoint_heatmaps(watch, bias=-3.0)


@failing("the attack goes down the loss instead of up", names=(), trace=False)
def adversarial_digits_descent(watch: Watch) -> float:
    return adversarial_digits(watch, sign=-1.0)


@failing("the attack is as large as the images", names=("not_learning",), trace=True)
def adversarial_digits_limit_5(watch: Watch) -> float:
    return adversarial_digits(watch, limit=5.0)


@failing("the temperature begins at e^9", names=("initial_loss",), trace=True)
def clip_digits_temperature(watch: Watch) -> float:
    return clip_digits(watch, log_scale=9.0)


@failing("captions are in another order than images", names=("not_learning",), trace=True)
def clip_digits_other_order(watch: Watch) -> float:
    return clip_digits(watch, own_order=True)


@failing("a threshold that no potential reaches", names=("dead", "zero_gradient"), trace=True)
def spiking_digits_threshold(watch: Watch) -> float:
    return spiking_digits(watch, threshold=60.0)


@failing(
    "the step has no surrogate gradient",
    names=("zero_gradient", "unmoved", "vanishing"),
    trace=True,
)
def spiking_digits_no_surrogate(watch: Watch) -> float:
    return spiking_digits(watch, slope=0.0)


@failing("labels that begin at 0 are lowered by 1", names=(), trace=False)
def fixmatch_digits_label_minus_1(watch: Watch) -> float:
    return fixmatch_digits(watch, first=1)


@failing(
    "all guesses count, sure or not, and 50 times as much as labels",
    names=("representation_collapse",),
    trace=True,
)
def fixmatch_digits_all_guesses(watch: Watch) -> float:
    return fixmatch_digits(watch, weight=50.0, limit=0.0)
