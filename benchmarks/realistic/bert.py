"""LoRA on a small BERT that has learnt to fill in masked words."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from realistic.trials import Watch, failing, healthy, update

CLS, MASK, FIRST, VOCAB = 0, 1, 2, 27
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def sentences(n: int, length: int = 14, follow: float = 0.9) -> Tensor:
    """(n, length) ids: each word is followed by one certain word, most of the time."""
    word = torch.randint(VOCAB - FIRST, (n,))
    rows = []
    for _ in range(length - 1):
        rows.append(word)
        other = torch.randint(VOCAB - FIRST, (n,))
        word = torch.where(torch.rand(n) < follow, (word * 7 + 3) % (VOCAB - FIRST), other)
    return F.pad(torch.stack(rows, 1) + FIRST, (1, 0), value=CLS)


def masked(ids: Tensor, share: float = 0.15) -> tuple[Tensor, Tensor]:
    """Ids with some words masked, and labels that count these alone."""
    chosen = (torch.rand(ids.shape) < share) & (ids != CLS)
    return ids.masked_fill(chosen, MASK), ids.masked_fill(~chosen, -100)


class LoRA(nn.Module):
    """A frozen linear layer and a low-rank update of it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, zero_both: bool) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        if zero_both:
            nn.init.zeros_(self.A)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)


def changed(n: int) -> tuple[Tensor, Tensor]:
    """Sentences, and whether one half of the words came from another language."""
    label = torch.randint(2, (n,))
    return torch.where(label[:, None] == 1, sentences(n), sentences(n, follow=0.4)), label


def pretrained() -> BertForMaskedLM:
    """A model that knows which word follows which."""
    model = BertForMaskedLM(BertConfig(**CONFIG))
    opt = AdamW(model.parameters(), lr=3e-3)
    for _ in range(250):
        ids, labels = masked(sentences(32))
        model(input_ids=ids, labels=labels).loss.backward()
        opt.step()
        opt.zero_grad()
    return model


def with_lora(zero_both: bool) -> BertForSequenceClassification:
    """A classifier on a frozen, pre-trained body, with LoRA on queries, values and outputs."""
    model = BertForSequenceClassification(BertConfig(**CONFIG, num_labels=2))
    model.bert.load_state_dict(pretrained().bert.state_dict(), strict=False)
    model.bert.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        at, rest = layer.attention.self, {"rank": 4, "alpha": 8, "zero_both": zero_both}
        at.query, at.value = LoRA(at.query, **rest), LoRA(at.value, **rest)
        layer.intermediate.dense = LoRA(layer.intermediate.dense, **rest)
        layer.output.dense = LoRA(layer.output.dense, **rest)
    return model


@healthy
def bert_lora(
    watch: Watch, *, lr: float = 3e-3, zero_both: bool = False, shuffled: bool = False,
    train_lora: bool = True, steps: int = 200,
) -> float:  # fmt: skip
    """LoRA by hand on a model that was trained before."""
    model = with_lora(zero_both)
    names = ("A", "B", "classifier.weight", "classifier.bias")
    own = [p for n, p in model.named_parameters() if n.endswith(names)]
    opt = AdamW(own if train_lora else model.classifier.parameters(), lr=lr, weight_decay=0.0)
    sched = OneCycleLR(opt, max_lr=lr, total_steps=steps, pct_start=0.1)
    with watch(model, opt) as w:
        for _ in range(steps):
            ids, label = changed(32)
            label = label[torch.randperm(32)] if shuffled else label
            loss = F.cross_entropy(model(input_ids=ids).logits, label)
            update(w, opt, loss, sched=sched)
    model.eval()
    ids, label = changed(500)
    return float((model(input_ids=ids).logits.argmax(-1) != label).float().mean())


@failing("both matrices of LoRA begin at 0", names=("zero_init", "zero_gradient"), trace=True)
def bert_lora_zero_zero(watch: Watch) -> float:
    return bert_lora(watch, zero_both=True)


@failing("the learning rate is 100 times too high", names=("lr_too_high",), trace=True)
def bert_lora_lr_x100(watch: Watch) -> float:
    return bert_lora(watch, lr=0.3)


@failing("labels do not belong to their texts", names=("not_learning",), trace=False)
def bert_lora_shuffled_labels(watch: Watch) -> float:
    return bert_lora(watch, shuffled=True)


@failing("LoRA's matrices are not in the optimizer", names=("unmoved",), trace=True)
def bert_lora_not_in_optimizer(watch: Watch) -> float:
    return bert_lora(watch, train_lora=False)
