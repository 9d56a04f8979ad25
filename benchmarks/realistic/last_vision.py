"""SimCLR, SAM, float16 with a scaler, a ViT, the tutorial's CNN, distillation with hints."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fresh_images import pick
from .trials import Watch, failing, fit, healthy
from .vision_data import error_rate, shapes, standard_digits


def view(x: Tensor, jitter: float) -> Tensor:
    """Images shifted by up to two pixels, brighter or darker, with noise."""
    top, left = torch.randint(-2, 3, (2,)).tolist()
    light = 1 + jitter * 0.4 * torch.randn(len(x), 1, 1, 1)
    moved = x.roll((top, left), (2, 3)) if jitter else x
    return moved * light + jitter * 0.3 * torch.randn_like(x)


@healthy
def simclr_shapes(watch: Watch, *, temperature: float = 0.2, jitter: float = 1.0) -> float:
    """NT-Xent over views of shapes, SGD; wrong classes by a linear probe's least squares."""
    data = shapes(2000, 31)
    x, label = data.image, data.label
    body = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
    body.extend([nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()])
    net = nn.Sequential(body, nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 32))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    target = torch.arange(128).roll(64)

    def loss_of(_: int) -> Tensor:
        xb = x[pick(1500)]
        z = F.normalize(net(torch.cat([view(xb, jitter), view(xb, jitter)])), dim=1)
        return F.cross_entropy((z @ z.T / temperature).fill_diagonal_(-1e9), target)

    fit(watch, net, opt, loss_of, 300)
    net.eval()
    with torch.no_grad():
        h = net[:3](x)
        h = torch.cat([(h - h.mean(0)) / (h.std(0) + 1e-5), torch.ones(2000, 1)], 1)
    gram = h[:1500].T @ h[:1500] + 10 * torch.eye(65)
    weights = torch.linalg.solve(gram, h[:1500].T @ F.one_hot(label[:1500], 3).float())
    return float(((h[1500:] @ weights).argmax(1) != label[1500:]).float().mean())


@failing("a temperature of 0.0002", names=("initial_loss",), trace=True)
def simclr_shapes_cold(watch: Watch) -> float:
    return simclr_shapes(watch, temperature=2e-4)


@failing("both views are the image itself", names=(), trace=False)
def simclr_shapes_same_view(watch: Watch) -> float:
    return simclr_shapes(watch, jitter=0.0)


class Sam(torch.optim.SGD):
    """Momentum, with a climb to worse weights nearby before the gradient that counts."""

    def climb(self, rho: float) -> list[Tensor]:
        """Moves the weights uphill and gives what they were."""
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        old = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p in params:
                p.add_(p.grad, alpha=rho / float(norm + 1e-12))
        return old

    def go_back(self, old: list[Tensor]) -> None:
        """Gives the weights the values that they had before the climb."""
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for p, value in zip(params, old, strict=True):
                p.copy_(value)


@healthy
def sam_digits(watch: Watch, *, rho: float = 0.05, back: bool = True) -> float:
    """SAM with two passes a step on a CNN with group norm."""
    x, y, x_test, y_test = standard_digits()
    net = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.AvgPool2d(2))
    net.extend([nn.Conv2d(16, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(), nn.Flatten()])
    net.append(nn.Linear(128, 10))
    opt = Sam(net.parameters(), lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [120, 160], 0.2)
    with watch(net, opt) as w:
        for _ in range(180):
            i = pick(len(x))
            loss = F.cross_entropy(net(x[i]), y[i])
            loss.backward()
            old = opt.climb(rho)
            opt.zero_grad()
            F.cross_entropy(net(x[i]), y[i]).backward()
            if back:
                opt.go_back(old)
            opt.step()
            opt.zero_grad()
            sched.step()
            w.loss(loss)
    return error_rate(net, x_test, y_test)


@failing("SAM climbs by a norm of 40", names=("not_learning",), trace=True)
def sam_digits_rho_40(watch: Watch) -> float:
    return sam_digits(watch, rho=40.0)


@failing("SAM climbs by 2 and never goes back", names=("ascent",), trace=True)
def sam_digits_stays_up(watch: Watch) -> float:
    return sam_digits(watch, rho=2.0, back=False)


@healthy
def amp_half_digits(watch: Watch, *, unscale_first: bool = True, by_hand: bool = False) -> float:
    """Is a digit even? float16 with a scaler, gradients clipped; the error rate."""
    x, y, x_test, y_test = standard_digits()
    even, net = (y % 2 == 0).float(), nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU())
    net.extend([nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 1)])
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    with watch(net, opt) as w:
        for _ in range(200):
            i = pick(len(x))
            with torch.autocast("cpu", torch.float16):
                out = net(x[i]).squeeze(1)
                p, goal = out.sigmoid(), even[i]
                if by_hand:
                    right = goal * (p + 1e-8).log() + (1 - goal) * (1 - p + 1e-8).log()
            loss = F.binary_cross_entropy_with_logits(out.float(), goal)
            if by_hand:
                loss = -right.mean()
            opt.zero_grad()
            scaler.scale(loss).backward()
            if unscale_first:
                scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            w.loss(loss)
    with torch.no_grad():
        return float(((net(x_test).squeeze(1) > 0) != (y_test % 2 == 0)).float().mean())


@failing("scaled gradients are clipped: unscale_ is forgotten", names=("clipping",), trace=True)
def amp_half_digits_clip_scaled(watch: Watch) -> float:
    return amp_half_digits(watch, unscale_first=False)


@failing(
    "log(p + 1e-8) by hand in float16, where 1e-8 is 0",
    names=("non_finite", "fp16_range"),
    trace=True,
)
def amp_half_digits_log_zero(watch: Watch) -> float:
    return amp_half_digits(watch, by_hand=True)


class PatchViT(nn.Module):
    """16 patches of 2×2 and a token for the class, norms before each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(1, 48, 2, 2), nn.Parameter(torch.zeros(1, 1, 48))
        self.place = nn.Parameter(0.02 * torch.randn(1, 17, 48))
        layer = nn.TransformerEncoderLayer(48, 3, 96, 0.1, "gelu", 1e-5, True, True)
        self.body = nn.TransformerEncoder(layer, 3, nn.LayerNorm(48), enable_nested_tensor=False)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).mT
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), patches], 1)
        return self.head(self.body(tokens + self.place)[:, 0])


@healthy
def vit_patches(watch: Watch, *, warm: int = 20, normal: float = 0.0) -> float:
    """AdamW with a linear warm-up, label smoothing."""
    x, y, x_test, y_test = standard_digits()
    net = PatchViT()
    for p in net.parameters() if normal else ():
        if p.ndim > 1:
            nn.init.normal_(p, std=normal)
    opt = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / warm))

    def loss_of(_: int) -> Tensor:
        i = pick(len(x), 32)
        return F.cross_entropy(net(x[i]), y[i], label_smoothing=0.1)

    fit(watch, net, opt, loss_of, 250, sched=sched)
    return error_rate(net, x_test, y_test)


@failing("a warm-up of 200,000 steps in a run of 250", names=("lr_too_low",), trace=True)
def vit_patches_endless_warmup(watch: Watch) -> float:
    return vit_patches(watch, warm=200_000)


@failing(
    "weights begin with a std of 1",
    names=("bad_init", "attention_logits", "initial_loss"),
    trace=True,
)
def vit_patches_std_1(watch: Watch) -> float:
    return vit_patches(watch, normal=1.0)


class Net(nn.Module):
    """The net of PyTorch's tutorial, for small images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 16, 3)
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x)).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


@healthy
def tutorial_digits(watch: Watch, *, dim: int | None = 1, one_batch: bool = False) -> float:
    """log_softmax and NLLLoss, SGD with momentum, batches of eight as in the tutorial."""
    x, y, x_test, y_test = standard_digits()
    net, criterion = Net(), nn.NLLLoss()
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def loss_of(_: int) -> Tensor:
        i = torch.arange(8) if one_batch else pick(len(x), 8)
        out = net(x[i])
        return criterion(out if dim is None else F.log_softmax(out, dim), y[i])

    fit(watch, net, opt, loss_of, 500, loss_func=criterion)
    return error_rate(net, x_test, y_test)


@failing("NLLLoss of logits, without log_softmax", names=("below_zero",), trace=True)
def tutorial_digits_logits(watch: Watch) -> float:
    return tutorial_digits(watch, dim=None)


@failing("log_softmax over the batch", names=("softmax_dim",), trace=True)
def tutorial_digits_dim_0(watch: Watch) -> float:
    return tutorial_digits(watch, dim=0)


@failing(
    "next(iter(loader)) in each step: always the first batch",
    names=("repeated_data", "overfit"),
    trace=True,
)
def tutorial_digits_first_batch(watch: Watch) -> float:
    return tutorial_digits(watch, one_batch=True)


@healthy
def hints_distilled(watch: Watch, *, log: bool = True) -> float:
    """A thin student learns a teacher's soft answers and, by a third layer, its hidden ones."""
    x, y, x_test, y_test = standard_digits()
    x, x_test = x.flatten(1), x_test.flatten(1)
    teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 10))
    opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for _ in range(150):
        opt.zero_grad()
        i = pick(len(x))
        F.cross_entropy(teacher(x[i]), y[i]).backward()
        opt.step()
    teacher.eval().requires_grad_(False)
    student = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10))
    hint = nn.Linear(20, 256)
    opt = torch.optim.NAdam([*student.parameters(), *hint.parameters()], lr=4e-3)

    def loss_of(_: int) -> Tensor:
        i = pick(len(x))
        h = student[:2](x[i])
        soft = student[2](h) / 4
        goal = (teacher(x[i]) / 4).softmax(1)
        kl = F.kl_div(soft.log_softmax(1) if log else soft, goal, reduction="batchmean")
        return 16 * kl + 0.5 * F.mse_loss(hint(h), teacher[:2](x[i]))

    fit(watch, [student, hint], opt, loss_of, 400)
    return error_rate(student, x_test, y_test)


@failing("kl_div of the student's logits, without log_softmax", names=("below_zero",), trace=True)
def hints_distilled_logits(watch: Watch) -> float:
    return hints_distilled(watch, log=False)
