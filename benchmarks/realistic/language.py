"""Whose name it is, min-char-rnn, Roman numbers, a small BERT of reviews."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from .data import LETTERS, batches, generator, manual
from .trials import Watch, failing, healthy, update

TONGUES = (  # how syllables of names start, their vowels, and how names end
    ("b c d f g l m n p r s t v", "a e i o", "ni lo ri no tti"),
    ("k s t n h m y r w", "a i u e o", "ka ko mura moto da"),
    ("k w z sz cz b m p r d", "a e i o y", "ski czyk wicz ak ek"),
    ("b d f g h k l m n sch w", "a e i o u ei", "er mann berg e stein"),
    ("d f g l m n r c b mac", "a e i o u", "an ey ley gan nell"),
)


def family_names(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Names as letters from 1, padded with 0; how long they are, and of which of five tongues."""
    rng = generator()
    y = rng.choices(range(5), (10, 5, 3, 2, 1), k=n)
    found = []
    for tongue in y:
        starts, vowels, ends = (part.split() for part in TONGUES[tongue])
        name = "".join(rng.choice(starts) + rng.choice(vowels) for _ in range(rng.randint(1, 3)))
        name += rng.choice(ends) if rng.random() < 0.7 else ""
        found.append(torch.tensor([ord(c) - 96 for c in name]))
    return (
        pad_sequence(found, batch_first=True),
        torch.tensor(list(map(len, found))),
        torch.tensor(y),
    )


class NameGRU(nn.Module):
    """Letters, a GRU, and the logarithms of probabilities, or logits."""

    def __init__(self, log: bool):
        super().__init__()
        self.embed, self.gru = nn.Embedding(27, 24), nn.GRU(24, 64, batch_first=True)
        self.head, self.log = nn.Linear(64, 5), nn.LogSoftmax(1) if log else nn.Identity()

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), n, batch_first=True, enforce_sorted=False)
        return self.log(self.head(self.gru(packed)[1][0]))


@healthy
def names_gru(watch: Watch, *, log: bool = True, lr: float = 0.1, momentum: float = 0.9) -> float:
    """PyTorch's tutorial of names and nations, in batches of 40; the share of errors."""
    x, n, y = family_names(3000)
    net, criterion = NameGRU(log), nn.NLLLoss()
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    with watch(net, opt, loss_func=criterion):
        for i in batches(2400, 40, 600):
            net.zero_grad()
            criterion(net(x[i], n[i]), y[i]).backward()
            opt.step()
    with torch.no_grad():
        return float((net(x[2400:], n[2400:]).argmax(1) != y[2400:]).float().mean())


@failing("NLLLoss gets logits: LogSoftmax is forgotten", names=("below_zero",), trace=True)
def names_gru_no_log_softmax(watch: Watch) -> float:
    return names_gru(watch, log=False)


@failing("SGD as it comes: 1e-3 without momentum", names=("lr_too_low",), trace=True)
def names_gru_plain_sgd(watch: Watch) -> float:
    return names_gru(watch, lr=1e-3, momentum=0.0)


class CharRNN(nn.Module):
    """Karpathy's min-char-rnn: letters as one of n, a tanh, and a state that goes on."""

    def __init__(self, std: float):
        super().__init__()
        self.rnn, self.head = nn.RNN(len(LETTERS), 128), nn.Linear(128, len(LETTERS))
        for p in self.parameters():
            nn.init.normal_(p, 0, std if p.ndim > 1 else 0)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, h = self.rnn(F.one_hot(x, len(LETTERS)).float(), h)
        return self.head(out), h.detach()


@healthy
def min_char_rnn(watch: Watch, *, std: float = 0.01, lr: float = 0.03) -> float:
    """Adagrad with 0.03, gradients clipped one by one, 25 letters a step; nats a letter."""
    text, test = (part[: len(part) // 16 * 16].view(16, -1).T for part in manual())
    net = CharRNN(std)
    opt = torch.optim.Adagrad(net.parameters(), lr=lr)
    h = None
    with watch(net, opt) as w:
        for at in range(0, 25 * 600, 25):
            at %= len(text) - 26
            out, h = net(text[at : at + 25], h)
            loss = F.cross_entropy(out.flatten(0, 1), text[at + 1 : at + 26].flatten())
            for p in net.parameters():
                p.grad = None
            loss.backward()
            nn.utils.clip_grad_value_(net.parameters(), 5.0)
            opt.step()
            w.loss(loss.item())
    with torch.no_grad():
        return float(F.cross_entropy(net(test[:-1])[0].flatten(0, 1), test[1:].flatten()))


@failing("randn without the 0.01", names=("bad_init", "saturated", "initial_loss"), trace=True)
def min_char_rnn_randn(watch: Watch) -> float:
    return min_char_rnn(watch, std=1.0)


@failing("Adagrad with the rate of 1e-3 that is Adam's", names=("lr_too_low",), trace=True)
def min_char_rnn_rate_of_adam(watch: Watch) -> float:
    return min_char_rnn(watch, lr=1e-3)


def romans(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers to 3999 as Romans wrote them, from behind, after 0s; and four digits after 10."""
    ten = ["", "0", "00", "000", "01", "1", "10", "100", "1000", "02"]
    found = []
    for n in numbers.tolist():
        parts = [[2 * k + int(c) for c in ten[n // 10**k % 10]] for k in (3, 2, 1, 0)]
        found.append(torch.tensor([1 + c for part in parts for c in part]))
    digits = torch.stack([numbers // 10**k % 10 for k in (3, 2, 1, 0)], 1)
    return pad_sequence(found, batch_first=True).flip(1), F.pad(digits, (1, 0), value=10)


class Reckoner(nn.Module):
    """Sutskever's two LSTMs: what one has read is the state from which the other writes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Embedding(10, 24), nn.LSTM(24, 80, batch_first=True)])
        self.decoder = nn.ModuleList([nn.Embedding(11, 24), nn.LSTM(24, 80, batch_first=True)])
        self.decoder.append(nn.Linear(80, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state = self.encoder[1](self.encoder[0](x))[1]
        return self.decoder[2](self.decoder[1](self.decoder[0](y), state)[0])


@healthy
def romans_seq2seq(watch: Watch, *, part: str = "", zeroed: bool = True) -> float:
    """MCMXCIV is 1994, with teacher forcing; the share of numbers with a wrong digit."""
    x, y = romans(1 + torch.randperm(3999))
    net = Reckoner()
    opt = torch.optim.NAdam((net.decoder if part else net).parameters(), lr=1e-2)
    with watch(net, opt) as w:
        for i in batches(3400, 64, 500):
            loss = F.cross_entropy(net(x[i], y[i, :-1]).mT, y[i, 1:])
            if zeroed:
                opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)
    with torch.no_grad():
        out = net(x[3400:], y[3400:, :-1])
        return float((out.argmax(-1) != y[3400:, 1:]).any(1).float().mean())


@failing("zero_grad is forgotten", names=("grads_pile_up",), trace=True)
def romans_seq2seq_no_zero_grad(watch: Watch) -> float:
    return romans_seq2seq(watch, zeroed=False)


@failing("the optimizer got the decoder only", names=("unmoved",), trace=True)
def romans_seq2seq_decoder_only(watch: Watch) -> float:
    return romans_seq2seq(watch, part="decoder")


def reviews(n: int) -> tuple[Tensor, Tensor]:
    """Reviews of 24 words: good 3 to 17, bad 18 to 32, "not" 33, others; which of them prevail."""
    x = torch.randint(34, 120, (n, 24))
    told, good = torch.rand(n, 24) < 0.25, torch.rand(n, 24) < 0.2 + 0.6 * torch.rand(n, 1).round()
    x = torch.where(told, torch.randint(3, 18, (n, 24)) + 15 * ~good, x)
    told[:, 0], x[:, 0] = False, 1
    turned = told & (torch.rand(n, 24) < 0.25)
    x = torch.where(turned.roll(-1, 1), 33, x)
    told, turned = (x > 2) & (x < 33), (x == 33).roll(1, 1)
    y = (told * torch.where((x < 18) ^ turned, 1, -1)).sum(1)
    return x[y != 0], (y > 0)[y != 0].long()


@healthy
def bert_reviews(watch: Watch, *, lr: float = 1e-3, planned: int = 300, warm_up: int = 20) -> float:
    """A small BERT from nothing, with transformers' schedule; the share of errors."""
    x, y = reviews(4000)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=120, intermediate_size=128, max_position_embeddings=24, **sizes)
    net = BertForSequenceClassification(config)
    opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)
    sched = get_linear_schedule_with_warmup(opt, warm_up, planned)
    with watch(net, opt) as w:
        for i in batches(3000, 32, 300):
            update(w, opt, net(x[i], labels=y[i]).loss, clip=(net, 1.0), sched=sched)
    net.eval()
    with torch.no_grad():
        return float((net(x[3000:]).logits.argmax(1) != y[3000:]).float().mean())


@failing("the rate is 5e-2 instead of 1e-3", names=("lr_too_high",), trace=True)
def bert_reviews_lr_x50(watch: Watch) -> float:
    return bert_reviews(watch, lr=5e-2)


@failing(
    "num_training_steps is the number of epochs: the rate is 0 after three steps",
    names=("lr_too_low", "unmoved"),
    trace=True,
)
def bert_reviews_planned_epochs(watch: Watch) -> float:
    return bert_reviews(watch, planned=3, warm_up=0)
