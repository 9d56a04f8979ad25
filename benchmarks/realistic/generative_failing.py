"""Generative models with one fault each."""

from __future__ import annotations

from torch import Tensor

from realistic.generative import (
    VAE,
    VQVAE,
    Quantizer,
    gan_dcgan,
    generative_vae,
    generative_vqvae,
)
from realistic.trials import Watch, failing


@failing("the weight of the KL term is 100", names=("posterior_collapse",), trace=True)
def generative_vae_beta_100(watch: Watch) -> float:
    """A sum over pixels divided by a mean over something else."""
    return generative_vae(watch, beta=100.0)


class LogVAE(VAE):
    """A VAE whose encoder gives the variance itself."""

    def spread(self, h: Tensor) -> Tensor:
        """Its logarithm."""
        return self.logvar(h).log()


@failing("the logarithm of a variance that may be negative", names=("non_finite",), trace=True)
def generative_vae_log_negative(watch: Watch) -> float:
    """A softplus is missing."""
    return generative_vae(watch, model=LogVAE())


@failing("targets of a cross entropy go to 16", names=("below_zero",), trace=True)
def generative_vae_pixels_to_16(watch: Watch) -> float:
    """The images are not divided by 16."""
    return generative_vae(watch, white=1.0)


class CutQuantizer(Quantizer):
    """A quantiser that forgets the gradient of what came in."""

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z is detached too early."""
        return super().forward(z.detach())


@failing("the encoder's output is detached", names=("zero_gradient", "unmoved"), trace=True)
def generative_vqvae_detached(watch: Watch) -> float:
    """The straight-through gradient is missing, and so is the commitment's."""
    model = VQVAE()
    model.quantizer = CutQuantizer(64, 8, 1.0)
    return generative_vqvae(watch, model=model)


@failing(
    "the generator's rate is 10 times too high",
    names=("mode_collapse", "lr_too_high"),
    trace=True,
)
def gan_dcgan_lr_g_x10(watch: Watch) -> float:
    """0.002: it runs from one image to the next."""
    return gan_dcgan(watch, lr_g=2e-3)
