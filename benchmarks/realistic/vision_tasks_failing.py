"""Tasks other than classification with one fault each."""

from __future__ import annotations

from torch import Tensor

from realistic.trials import Watch, failing
from realistic.vision_data import shapes
from realistic.vision_tasks import (
    UNet,
    vision_detector,
    vision_size_regression,
    vision_transfer_frozen,
    vision_unet_dice,
)


class SigmoidUNet(UNet):
    """A U-Net that ends in a sigmoid."""

    def forward(self, x: Tensor) -> Tensor:
        """A probability for each pixel."""
        return super().forward(x).sigmoid()


@failing("a sigmoid before the loss with logits", names=("probabilities",), trace=True)
def vision_unet_sigmoid_twice(watch: Watch) -> float:
    """Whatever is above 0, a half at least, is called an object."""
    return vision_unet_dice(watch, model=SigmoidUNet())


@failing("one image in fifty has a pixel that is NaN", names=("non_finite",), trace=True)
def vision_unet_nan_pixel(watch: Watch) -> float:
    """0/0 when it was normalised."""
    image = shapes(1024, 0).image.clone()
    image[::50, :, 0, 0] = float("nan")
    return vision_unet_dice(watch, image=image)


@failing("the boxes are in pixels of a photo", names=("target_scale",), trace=True)
def vision_detector_boxes_in_pixels(watch: Watch) -> float:
    """640 of them; the class is forgotten beside the box."""
    return vision_detector(watch, pixels=640.0)


@failing("(64, 1) is compared with (64,)", names=("broadcast",), trace=True)
def vision_size_broadcast(watch: Watch) -> float:
    """Every prediction meets every target."""
    return vision_size_regression(watch, column=False)


@failing("the head is replaced after the optimizer is made", names=("unmoved",), trace=True)
def vision_transfer_head_after_optimizer(watch: Watch) -> float:
    """The optimizer steps a head that nobody uses."""
    return vision_transfer_frozen(watch, head_last=True)


@failing("the rate is that of fine-tuning a whole model", names=("lr_too_low",), trace=True)
def vision_transfer_lr_1e5(watch: Watch) -> float:
    """1e-5 for a head that begins at random."""
    return vision_transfer_frozen(watch, lr=1e-5)
