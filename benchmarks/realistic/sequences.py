"""Recurrent models: a tagger, translation, speech, and tasks of memory."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from realistic.texts import generator
from realistic.trials import Watch, healthy, update

N_TAGS = 5


class Tagger(nn.Module):
    """A bidirectional LSTM on packed sequences; 0 is padding."""

    def __init__(self, vocab: int = 50, d: int = 32) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, d, padding_idx=0)
        self.drop = nn.Dropout(0.2)
        self.lstm = nn.LSTM(d, 48, bidirectional=True, batch_first=True)
        self.head = nn.Linear(96, N_TAGS)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.drop(self.tok(ids)), lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(self.drop(out))


def tagged(n: int, longest: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, tags (-100 in padding) and lengths: a word's tag depends on the word before it."""
    rng = generator()
    rng.seed(int(torch.randint(2**31, ())))
    ids, tags = [], []
    for _ in range(n):
        length = longest if rng.random() < 0.1 else rng.randint(4, 10)
        words = torch.randint(1, 50, (length,))
        before = F.pad(words[:-1], (1, 0))
        ids.append(words)
        tags.append(torch.where(before % 7 == 0, 4, words % 4))
    lengths = torch.tensor([len(row) for row in ids])
    return pad_sequence(ids, True), pad_sequence(tags, True, -100), lengths


@healthy
def lstm_tagger(
    watch: Watch, *, lr: float = 5e-3, unknown: bool = False, steps: int = 200,
) -> float:  # fmt: skip
    """Tags for words, by packed sequences; RMSprop."""
    model = Tagger()
    opt = torch.optim.RMSprop(model.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.StepLR(opt, steps // 2, 0.3)
    with watch(model, opt) as w:
        for _ in range(steps):
            ids, tags, lengths = tagged(32)
            ids = torch.ones_like(ids) if unknown else ids
            loss = F.cross_entropy(model(ids, lengths).transpose(1, 2), tags)
            update(w, opt, loss, clip=(model, 5.0), sched=sched)
    ids, tags, lengths = tagged(300)
    ids = torch.ones_like(ids) if unknown else ids
    wrong = model.eval()(ids, lengths).argmax(-1) != tags
    return float(wrong[tags >= 0].float().mean())


class Seq2Seq(nn.Module):
    """A GRU that reads, and one that writes with Bahdanau's attention."""

    def __init__(self, vocab: int, d: int, softmax_dim: int) -> None:
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.encoder = nn.GRU(d, d, batch_first=True)
        self.decoder = nn.GRUCell(2 * d, d)
        self.query, self.key, self.energy = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, 1)
        self.head = nn.Linear(2 * d, vocab)
        self.softmax_dim = softmax_dim

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory, h = self.encoder(self.src(src))
        h, keys, words, out = h[0], self.key(memory), self.tgt(tgt), []
        for t in range(tgt.shape[1]):
            energy = self.energy(torch.tanh(keys + self.query(h)[:, None]))
            context = (energy.softmax(self.softmax_dim) * memory).sum(1)
            h = self.decoder(torch.cat((words[:, t], context), -1), h)
            out.append(self.head(torch.cat((h, context), -1)))
        return torch.stack(out, 1)


def reversed_pairs(n: int, length: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Source, decoder's input and target: the source backwards; 0 begins."""
    src = torch.randint(1, 12, (n, length))
    target = src.flip(1)
    return src, F.pad(target[:, :-1], (1, 0)), target


@healthy
def seq2seq_attention(
    watch: Watch, *, lr: float = 5e-3, softmax_dim: int = 1, steps: int = 300
) -> float:
    """Turns a sequence around, with teacher forcing; loss as a module."""
    model = Seq2Seq(12, 48, softmax_dim)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    with watch(model, opt, loss_func=criterion):
        for _ in range(steps):
            src, given, target = reversed_pairs(48)
            loss = criterion(model(src, given).flatten(0, 1), target.flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            opt.step()
    src, given, target = reversed_pairs(300)
    return float((model(src, given).argmax(-1) != target).float().mean())


class Speech(nn.Module):
    """Convolution, recurrence, log-probabilities of symbols; 0 is the blank."""

    def __init__(self, n_mel: int, vocab: int, log_softmax: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(n_mel, 48, 3, padding=1)
        self.norm = nn.BatchNorm1d(48)
        self.gru = nn.GRU(48, 32, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, vocab)
        self.log_softmax = log_softmax

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = self.head(self.gru(x.transpose(1, 2))[0])
        return x.log_softmax(-1) if self.log_softmax else x


def spoken(n: int, templates: Tensor, n_symbols: int = 5) -> tuple[Tensor, Tensor]:
    """(n, mel, 20) noisy frames of symbols that last 2–4 frames, and (n, n_symbols) ids."""
    text = torch.randint(1, len(templates), (n, n_symbols))
    frames = torch.zeros(n, 20, dtype=torch.long)
    for i, row in enumerate(text):
        long = row.repeat_interleave(torch.randint(2, 5, (n_symbols,)))[:20]
        frames[i, : len(long)] = long
    x = templates[frames] + 0.3 * torch.randn(n, 20, templates.shape[1])
    return x.transpose(1, 2), text


@healthy
def ctc_speech(
    watch: Watch, *, lr: float = 5e-3, log_softmax: bool = True, steps: int = 300
) -> float:
    """CTC on synthetic speech: says nothing but blanks at first, then learns."""
    model, templates = Speech(16, 9, log_softmax), torch.randn(9, 16)
    templates[0] = 0
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    ctc, lengths = nn.CTCLoss(), (torch.full((32,), 20), torch.full((32,), 5))
    with watch(model, opt) as w:
        for _ in range(steps):
            x, text = spoken(32, templates)
            loss = ctc(model(x).transpose(0, 1), text, *lengths)
            update(w, opt, loss, clip=(model, 5.0))
    x, text = spoken(200, templates)
    best = model.eval()(x).argmax(-1)
    read = [[int(c) for c in row.unique_consecutive() if c] for row in best]
    return sum(a != b for a, b in zip(read, text.tolist(), strict=True)) / 200


class Memory(nn.Module):
    """A recurrent model whose last output is a number."""

    def __init__(self, cell: type[nn.Module], d: int, **options) -> None:
        super().__init__()
        self.rnn, self.head = cell(2, d, batch_first=True, **options), nn.Linear(d, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1]).squeeze(-1)


def additions(n: int, length: int) -> tuple[Tensor, Tensor]:
    """Numbers of which two are marked, and the sum of these."""
    x, mark = torch.rand(n, length), torch.zeros(n, length)
    for half in (0, length // 2):
        mark[torch.arange(n), half + torch.randint(length // 2, (n,))] = 1
    return torch.stack((x, mark), -1), (x * mark).sum(1)


@healthy
def lstm_addition(
    watch: Watch, *, cell: type[nn.Module] = nn.LSTM, lr: float = 5e-3, clip: float = 1.0,
    length: int = 18, steps: int = 600, **options,
) -> float:  # fmt: skip
    """Adds two marked numbers: a long plateau, then it learns."""
    model = Memory(cell, 48, **options)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    with watch(model, opt) as w:
        for _ in range(steps):
            x, y = additions(64, length)
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            w.loss(loss.item())
    x, y = additions(1000, length)
    return float(F.mse_loss(model(x), y).detach())
