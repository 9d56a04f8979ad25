"""Generative models with one fault each."""

from __future__ import annotations

import torch
from torch import Tensor

from realistic.generative import (
    VAE,
    VQVAE,
    Quantizer,
    gan_dcgan,
    generative_denoising_autoencoder,
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


@failing("the codebook begins far outside the data", names=("bad_init",), trace=True)
def generative_vqvae_codebook_far(watch: Watch) -> float:
    """Between -100 and 100: nearly all vectors take the same code."""
    return generative_vqvae(watch, model=VQVAE(bound=100.0))


@failing("the targets go to 255, the inputs to 1", names=("target_scale",), trace=True)
def generative_autoencoder_targets_255(watch: Watch) -> float:
    """Only the noisy copy was normalised."""
    return generative_denoising_autoencoder(watch, white=255.0)


@failing("the discriminator's learning rate is 0.1", names=("lr_too_high",), trace=True)
def gan_dcgan_lr_d_x100(watch: Watch) -> float:
    """A hundred times too high."""
    return gan_dcgan(watch, lr_d=0.1)


@failing("fakes are detached for the generator too", names=("unmoved",), trace=True)
def gan_dcgan_generator_detached(watch: Watch) -> float:
    """The generator never gets a gradient."""
    return gan_dcgan(watch, cut=True)


def one_noise(n: int) -> Tensor:
    """The same numbers for all images of a batch, nearly."""
    return torch.randn(1, 16) + 0.01 * torch.randn(n, 16)


@failing("the noise is the same in the whole batch", names=("mode_collapse",), trace=True)
def gan_dcgan_same_noise(watch: Watch) -> float:
    """randn(1, n) and a hope for broadcasting."""
    return gan_dcgan(watch, noise_of=one_noise)


@failing(
    "the generator's rate is 10 times too high",
    names=("mode_collapse", "lr_too_high"),
    trace=True,
)
def gan_dcgan_lr_g_x10(watch: Watch) -> float:
    """0.002: it runs from one image to the next."""
    return gan_dcgan(watch, lr_g=2e-3)
