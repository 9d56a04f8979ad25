"""Representations learned without labels or from triplets; healthy ones and those with a fault."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realistic.trials import Watch, failing, healthy, update
from realistic.vision_data import batches, digits


def view(x: Tensor) -> Tensor:
    """Images (N, 1, 8, 8) shifted, turned brighter or darker, and with noise."""
    n, padded = len(x), F.pad(x, (1, 1, 1, 1))
    i, j = torch.randint(0, 3, (2, n, 1, 1))
    rows = (i + torch.arange(8)[:, None]).expand(n, 8, 8)
    x = padded[torch.arange(n)[:, None, None], 0, rows, (j + torch.arange(8)).expand(n, 8, 8)]
    return x[:, None] * (0.6 + 0.8 * torch.rand(n, 1, 1, 1)) + 0.3 * torch.randn(n, 1, 8, 8)


def images() -> tuple[Tensor, Tensor]:
    """Digits between -1 and 1, to train with and held out."""
    x, _, x_test, _ = digits()
    return x / 8 - 1, x_test / 8 - 1


@torch.no_grad()
def wrong_neighbours(model: nn.Module) -> float:
    """The share of views whose nearest view of a training image shows another digit."""
    x, y, x_test, y_test = digits()
    bank, queries = (F.normalize(model.eval()(view(t / 8 - 1)), dim=1) for t in (x, x_test))
    return (y[(queries @ bank.T).argmax(1)] != y_test).float().mean().item()


def encoder(n_out: int = 32) -> nn.Sequential:
    """A CNN with batch norm and a projection."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, n_out),
    )  # fmt: skip


@healthy
def ssl_simclr(watch: Watch, *, temperature: float = 0.2, negatives: bool = True) -> float:
    """Two views of each image find each other among 126 others."""
    x, _ = images()
    model = encoder()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    with watch(model, opt) as w:
        for idx in batches(len(x), 64, 250):
            z = F.normalize(model(torch.cat([view(x[idx]), view(x[idx])])), dim=1)
            sim = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
            other = torch.arange(128).roll(64)
            loss = F.cross_entropy(sim, other) if negatives else 1 - (z[:64] * z[64:]).sum(1).mean()
            update(w, opt, loss)
    return wrong_neighbours(model)


@failing("the views have no negatives", names=("representation_collapse",), trace=True)
def ssl_simclr_no_negatives(watch: Watch) -> float:
    """Only the similarity of both views, which is best when all are alike."""
    return ssl_simclr(watch, negatives=False)


@failing("the temperature is 100", names=("not_learning",), trace=True)
def ssl_simclr_temperature_100(watch: Watch) -> float:
    """All similarities look the same, and the loss stays at its first value."""
    return ssl_simclr(watch, temperature=100.0)


def predictor(n_out: int = 32) -> nn.Sequential:
    """A small MLP that guesses the other view's embedding."""
    return nn.Sequential(nn.Linear(n_out, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, n_out))


@healthy
def ssl_simsiam(watch: Watch, *, stop: bool = True) -> float:
    """Negative cosine similarities, the gradient stopped at one side; SGD with a cosine."""
    x, _ = images()
    model, guess = encoder(), predictor()
    opt = torch.optim.SGD([*model.parameters(), *guess.parameters()], lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 300)
    with watch({"encoder": model, "predictor": guess}, opt) as w:
        for idx in batches(len(x), 64, 300):
            a, b = model(view(x[idx])), model(view(x[idx]))
            p, q = guess(a), guess(b)
            if stop:
                a, b = a.detach(), b.detach()
            loss = -(F.cosine_similarity(p, b).mean() + F.cosine_similarity(q, a).mean()) / 2
            update(w, opt, loss, sched=sched)
    return wrong_neighbours(model)


@failing("the stop-gradient is forgotten", names=("representation_collapse",), trace=True)
def ssl_simsiam_no_stop(watch: Watch) -> float:
    """The encoder can make all embeddings alike."""
    return ssl_simsiam(watch, stop=False)


@healthy
def ssl_byol(watch: Watch) -> float:
    """A net guesses what a slow average of itself says of another view."""
    x, _ = images()
    online, guess = encoder(), predictor()
    target = deepcopy(online).requires_grad_(False)
    opt = torch.optim.Adam([*online.parameters(), *guess.parameters()], lr=2e-3)
    with watch([online, guess], opt) as w:
        for idx in batches(len(x), 64, 250):
            a, b = view(x[idx]), view(x[idx])
            with torch.no_grad():
                ta, tb = target(a), target(b)
            loss = 2 - F.cosine_similarity(guess(online(a)), tb).mean()
            loss = loss - F.cosine_similarity(guess(online(b)), ta).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss.item())
            with torch.no_grad():
                for p, q in zip(target.parameters(), online.parameters(), strict=True):
                    p.lerp_(q, 0.02)
    return wrong_neighbours(online)


class MAE(nn.Module):
    """A transformer of PyTorch that fills in the patches that are hidden."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.embed, self.out = nn.Linear(4, dim), nn.Linear(dim, 4)
        self.hidden = nn.Parameter(torch.randn(dim) * 0.02)
        self.pos = nn.Parameter(torch.randn(16, dim) * 0.2)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, patches: Tensor, mask: Tensor) -> Tensor:
        """All patches, guessed from those that are not masked."""
        tokens = torch.where(mask[..., None], self.hidden, self.embed(patches))
        return self.out(self.encoder(tokens + self.pos))


@healthy
def ssl_masked_autoencoder(watch: Watch, *, lr: float = 2e-3) -> float:
    """Half of the patches are hidden; the error on those, with AdamW and a warm-up."""
    x, x_test = (F.unfold(t, 2, stride=2).transpose(1, 2) for t in images())
    model = MAE()
    opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.05)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=30)

    def loss_of(patches: Tensor) -> Tensor:
        mask = torch.rand(patches.shape[:2]) < 0.5
        return F.mse_loss(model(patches, mask)[mask], patches[mask])

    with watch(model, opt) as w:
        for idx in batches(len(x), 64, 250):
            loss = loss_of(x[idx])
            update(w, opt, loss, sched=warm)
    with torch.no_grad():
        return sum(loss_of(x_test).item() for _ in range(5)) / 5


@failing("the learning rate is 30 times too high", names=("lr_too_high",), trace=True)
def ssl_masked_autoencoder_lr_x30(watch: Watch) -> float:
    """The transformer says the same for every image."""
    return ssl_masked_autoencoder(watch, lr=0.06)


@healthy
def ssl_triplet(watch: Watch, *, swap: bool = False) -> float:
    """A margin between images of the same digit and of another; the nearest image's label."""
    x, y, x_test, y_test = digits()
    x, x_test = x / 8 - 1, x_test / 8 - 1
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Mish(), nn.Linear(64, 4))
    opt = torch.optim.Adamax(model.parameters(), lr=4e-3)
    criterion = nn.TripletMarginLoss(margin=0.5)
    by_class = [(y == k).nonzero()[:, 0] for k in range(10)]
    with watch(model, opt, loss_func=criterion):
        for idx in batches(len(x), 64, 300):
            other = (y[idx] + torch.randint(1, 10, (64,))) % 10
            same, diff = (
                torch.stack([p[torch.randint(len(p), ())] for p in (by_class[k] for k in kinds)])
                for kinds in (y[idx].tolist(), other.tolist())
            )
            if swap:
                same, diff = diff, same
            loss = criterion(*(F.normalize(model(x[i]), dim=1) for i in (idx, same, diff)))
            opt.zero_grad()
            loss.backward()
            opt.step()
    with torch.no_grad():
        near = torch.cdist(*(F.normalize(model(t), dim=1) for t in (x_test, x))).argmin(1)
    return (y[near] != y_test).float().mean().item()


@failing("positives and negatives are swapped", names=(), trace=False)
def ssl_triplet_swapped(watch: Watch) -> float:
    """The loss falls: images of a digit are pushed apart."""
    return ssl_triplet(watch, swap=True)
