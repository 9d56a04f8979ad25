"""Bags of words: word2vec, text classification; and a small model that learns from a large one."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from realistic.texts import sources, windows
from realistic.trials import Watch, failing, healthy, update

N_TOPICS, N_WORDS = 8, 160


def corpus(n: int = 20000) -> Tensor:
    """Words that come in runs of one topic; the topic of a word is its id modulo 8."""
    topic = torch.randint(N_TOPICS, (n // 20,)).repeat_interleave(20)
    topic = torch.where(torch.rand(n) < 0.2, torch.randint(N_TOPICS, (n,)), topic)
    return topic + N_TOPICS * torch.randint(N_WORDS // N_TOPICS, (n,))


class SkipGram(nn.Module):
    """Vectors of words and vectors of contexts; returns logits of pairs."""

    def __init__(self, d: int = 24, std: float = 0.3) -> None:
        super().__init__()
        self.word, self.context = nn.Embedding(N_WORDS, d), nn.Embedding(N_WORDS, d)
        nn.init.normal_(self.word.weight, std=std)
        nn.init.zeros_(self.context.weight)

    def forward(self, word: Tensor, context: Tensor) -> Tensor:
        return (self.word(word)[:, None] * self.context(context)).sum(-1)


@healthy
def word2vec(
    watch: Watch, *, lr: float = 0.1, negatives: int = 5, std: float = 0.3, steps: int = 400
) -> float:
    """Skip-gram with negative sampling, by Adagrad; how often the nearest word is off topic."""
    model, text = SkipGram(std=std), corpus()
    opt = torch.optim.Adagrad(model.parameters(), lr=lr)
    with watch(model, opt) as w:
        for _ in range(steps):
            pair = windows(text, 128, 4)[:, [0, int(torch.randint(1, 5, ()))]]
            noise = torch.randint(N_WORDS, (128, negatives))
            logits = model(pair[:, 0], torch.cat((pair[:, 1:], noise), 1))
            loss = -F.logsigmoid(logits[:, 0]) - F.logsigmoid(-logits[:, 1:]).sum(1)
            opt.zero_grad()
            loss.mean().backward()
            opt.step()
            w.loss(loss.mean().item())
    v = F.normalize(model.word.weight.detach(), dim=1)
    near = (v @ v.T).fill_diagonal_(-2).argmax(1)
    return float((near % N_TOPICS != torch.arange(N_WORDS) % N_TOPICS).float().mean())


@failing(
    "no negative samples: all pairs are positive", names=("representation_collapse",), trace=True
)
def word2vec_no_negatives(watch: Watch) -> float:
    return word2vec(watch, negatives=0)


@failing(
    "vectors of words and of contexts all begin at 0",
    names=("zero_init", "zero_gradient"),
    trace=True,
)
def word2vec_zero_zero(watch: Watch) -> float:
    return word2vec(watch, std=0.0)


@failing("the learning rate is 1000 times too low", names=("lr_too_low",), trace=True)
def word2vec_lr_per_1000(watch: Watch) -> float:
    return word2vec(watch, lr=1e-4)


@cache
def lines() -> tuple[list[Tensor], Tensor]:
    """Lines of code as hashed three-letter pieces, and the module of each, in order."""
    found, labels = [], []
    for label, source in enumerate(sources().values()):
        long = [line.strip() for line in source.splitlines() if len(line.strip()) > 25]
        for five in zip(*[iter(long)] * 5, strict=False):
            text = " ".join(five)
            pieces = [text[i : i + 3].encode() for i in range(len(text) - 2)]
            found.append(torch.tensor([int.from_bytes(p, "big") % 2003 for p in pieces]))
            labels.append(label)
    return found, torch.tensor(labels)


class TextClassifier(nn.Module):
    """The mean of embeddings, and a linear layer."""

    def __init__(self, n_classes: int, d: int = 32) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(2003, d), nn.Linear(d, n_classes)
        nn.init.uniform_(self.bag.weight, -0.5, 0.5)

    def forward(self, texts: list[Tensor]) -> Tensor:
        offsets = torch.tensor([0, *map(len, texts[:-1])]).cumsum(0)
        return self.head(self.bag(torch.cat(texts), offsets))


@healthy
def text_bag(
    watch: Watch, *, lr: float = 4.0, size: int = 16, epochs: int = 10, shuffle: bool = True,
    mixed: bool = False, probs: bool = False,
) -> float:  # fmt: skip
    """Which module a piece of code is from, as in PyTorch's tutorial: SGD, clipping, StepLR."""
    texts, labels = lines()
    order = torch.randperm(len(texts))
    test, train = order[: len(order) // 5], order[len(order) // 5 :].sort().values
    labels = labels[torch.randperm(len(labels))] if mixed else labels
    model = TextClassifier(len(sources()))
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.StepLR(opt, max(1, epochs - 3), gamma=0.1)
    criterion = nn.CrossEntropyLoss()
    with watch(model, opt, loss_func=criterion) as w:
        for _ in range(epochs):
            rows = train[torch.randperm(len(train))] if shuffle else train
            for batch in rows.split(size):
                out = model([texts[i] for i in batch])
                loss = criterion(out.softmax(1) if probs else out, labels[batch])
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                opt.step()
            sched.step()
            w.epoch()
    wrong = model([texts[i] for i in test]).argmax(1) != lines()[1][test]
    return float(wrong.float().mean())


@failing("data are sorted by label, and not shuffled", names=("unshuffled",), trace=True)
def text_bag_sorted(watch: Watch) -> float:
    return text_bag(watch, shuffle=False)


@failing("labels do not belong to their texts", names=("not_learning",), trace=False)
def text_bag_shuffled_labels(watch: Watch) -> float:
    return text_bag(watch, mixed=True)


@failing("softmax before cross_entropy", names=("probabilities",), trace=True)
def text_bag_softmax_twice(watch: Watch) -> float:
    return text_bag(watch, probs=True)


@failing("the learning rate is 1000 times too low", names=("lr_too_low",), trace=True)
def text_bag_lr_per_1000(watch: Watch) -> float:
    return text_bag(watch, lr=4e-3)


@cache
def digits() -> tuple[Tensor, Tensor]:
    """(1797, 64) standardised images, and labels."""
    x, y = load_digits(return_X_y=True)
    return torch.tensor((x - 4.9) / 6.0, dtype=torch.float32), torch.tensor(y.astype(np.int64))


def classifier(width: int) -> nn.Sequential:
    """A small network for digits."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def taught(x: Tensor, y: Tensor) -> nn.Sequential:
    """A large classifier, trained."""
    teacher = classifier(256)
    opt = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(150):
        rows = torch.randint(len(x), (128,))
        loss = F.cross_entropy(teacher(x[rows]), y[rows], label_smoothing=0.1)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return teacher.eval().requires_grad_(False)


@healthy
def distill_digits(
    watch: Watch, *, lr: float = 3e-3, temperature: float = 3.0, weight: float = 0.9,
    untaught: bool = False, twice: bool = False, log: bool = True, steps: int = 150,
) -> float:  # fmt: skip
    """A small student learns from a teacher's soft labels and from few hard ones."""
    x, y = digits()
    order = torch.randperm(len(x))
    train, test = order[:1200], order[1200:]
    teacher = classifier(256) if untaught else taught(x[train], y[train])
    student = classifier(24)
    opt = torch.optim.Adam(student.parameters(), lr=lr)
    with watch(student, opt) as w:
        for _ in range(steps):
            rows = train[torch.randint(len(train), (64,))]
            logits = student(x[rows])
            logits = logits.softmax(1) if twice else logits
            soft = (teacher(x[rows]) / temperature).softmax(1)
            own = (logits / temperature).log_softmax(1)
            kl = F.kl_div(own if log else own.exp(), soft, reduction="batchmean")
            hard = F.cross_entropy(logits[:8], y[rows[:8]])
            loss = weight * temperature**2 * kl + (1 - weight) * hard
            update(w, opt, loss)
    return float((student(x[test]).argmax(1) != y[test]).float().mean())


@failing("softmax of a softmax in both losses", names=("probabilities",), trace=True)
def distill_softmax_twice(watch: Watch) -> float:
    return distill_digits(watch, twice=True)


@failing(
    "kl_div of probabilities, not of their logarithm",
    names=("below_zero", "probabilities"),
    trace=True,
)
def distill_no_log(watch: Watch) -> float:
    return distill_digits(watch, log=False)


@failing("the teacher was never trained", names=(), trace=False)
def distill_untaught_teacher(watch: Watch) -> float:
    return distill_digits(watch, untaught=True)
