"""Classifiers of images with one fault each."""

from __future__ import annotations

import math

import torch
from torch import nn

from realistic.trials import Watch, failing
from realistic.vision import (
    ViT,
    deep_mlp,
    lenet,
    vision_deep_mlp_sgd,
    vision_lenet_adam,
    vision_mobilenet_mixup_ema,
    vision_resnet_one_cycle,
    vision_vit_adamw,
)
from realistic.vision_data import standard_digits


@failing("the highest learning rate is 30 times too high", names=("lr_too_high",), trace=True)
def vision_resnet_lr_x30(watch: Watch) -> float:
    """3 in place of 0.1."""
    return vision_resnet_one_cycle(watch, max_lr=3.0)


@failing("zero_grad is forgotten, so gradients add up", names=("grads_pile_up",), trace=True)
def vision_resnet_no_zero_grad(watch: Watch) -> float:
    """The momentum of a sum of all gradients."""
    return vision_resnet_one_cycle(watch, zero=False)


@failing("the images come sorted by their class", names=("unshuffled",), trace=True)
def vision_resnet_sorted(watch: Watch) -> float:
    """A folder of images for each class, and shuffle=True forgotten."""
    x, y, _, _ = standard_digits()
    order = y.argsort(stable=True)
    return vision_resnet_one_cycle(watch, data=(x[order], y[order]), shuffle=False)


@failing("gradients are clipped at a norm of 0.01", names=("clipping",), trace=True)
def vision_resnet_clip_1e2(watch: Watch) -> float:
    """SGD goes hardly anywhere."""
    return vision_resnet_one_cycle(watch, clip=1e-2)


@failing("momentum is 0.999 in a run of 190 steps", names=("momentum",), trace=True)
def vision_resnet_momentum_0999(watch: Watch) -> float:
    """One nine too many."""
    return vision_resnet_one_cycle(watch, momentum=0.999)


@failing("batch norm with batches of two images", names=("small_batch",), trace=True)
def vision_resnet_batch_2(watch: Watch) -> float:
    """As after an out-of-memory error."""
    x, y, _, _ = standard_digits()
    return vision_resnet_one_cycle(watch, data=(x[:400], y[:400]), size=2, epochs=2)


@failing("the labels belong to other images", names=("not_learning",), trace=False)
def vision_resnet_labels_shuffled(watch: Watch) -> float:
    """Images and labels listed in different orders."""
    x, y, _, _ = standard_digits()
    return vision_resnet_one_cycle(watch, data=(x, y[torch.randperm(len(y))]))


@failing("the loader gives the same batches of 32", names=("repeated_data", "overfit"), trace=True)
def vision_resnet_four_batches(watch: Watch) -> float:
    """A subset for debugging that stayed: 128 images."""
    x, y, _, _ = standard_digits()
    return vision_resnet_one_cycle(
        watch, data=(x[:128], y[:128]), shuffle=False, size=32, epochs=48
    )


@failing("softmax over the images of the batch", names=("softmax_dim",), trace=True)
def vision_vit_softmax_dim(watch: Watch) -> float:
    """dim=0 in place of the last."""
    return vision_vit_adamw(watch, model=ViT(softmax_dim=0))


@failing("dropout of 0.9 in each branch", names=("dropout",), trace=True)
def vision_vit_dropout_09(watch: Watch) -> float:
    """The rate taken for the share to keep."""
    return vision_vit_adamw(watch, model=ViT(dropout=0.9))


@failing("all biases begin at -5", names=("dead", "bad_init"), trace=True)
def vision_lenet_bias_minus_5(watch: Watch) -> float:
    """ReLUs that hardly ever open."""
    model = lenet()
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.constant_(layer.bias, -5.0)
    return vision_lenet_adam(watch, model=model)


@failing("images with values to 16 are divided by 255", names=("input_scale",), trace=True)
def vision_lenet_divided_by_255(watch: Watch) -> float:
    """Their standard deviation is 0.024."""
    return vision_lenet_adam(watch, scale=6 / 255)


@failing("Adam with a weight decay of 0.1", names=("weight_decay",), trace=True)
def vision_lenet_weight_decay_01(watch: Watch) -> float:
    """The decay outweighs every gradient."""
    return vision_lenet_adam(watch, decay=0.1)


@failing("twelve layers of sigmoids", names=("vanishing", "saturated"), trace=True)
def vision_deep_mlp_sigmoid(watch: Watch) -> float:
    """Each takes three quarters of the gradient."""
    return vision_deep_mlp_sgd(watch, model=deep_mlp(nn.Sigmoid))


@failing("weights begin 2.5 times too large", names=("bad_init", "exploding"), trace=True)
def vision_deep_mlp_init_x2_5(watch: Watch) -> float:
    """2.5 to the twelfth is 60 000."""
    return vision_deep_mlp_sgd(watch, model=deep_mlp(gain=2.5 * math.sqrt(2)))


@failing("all weights begin with the same value", names=("constant_init",), trace=True)
def vision_deep_mlp_constant_init(watch: Watch) -> float:
    """Every unit of a layer is the same unit."""
    model = deep_mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.weight, 1 / 64)
    return vision_deep_mlp_sgd(watch, model=model)


@failing("the average of weights forgets too slowly", names=(), trace=False)
def vision_mobilenet_ema_slow(watch: Watch) -> float:
    """0.9995 in a run of 250 steps: the model that is used is still the first."""
    return vision_mobilenet_mixup_ema(watch, keep=0.9995)
