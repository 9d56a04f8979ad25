"""Which activation reads each layer, and what else the recorders give a diagnosis."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit import ActivationStats, ParamStats, Run, watch
from hookkit._core.graph import users_of
from hookkit.recorders.layer_graph import consumers, predecessors


def read_by(net, x):
    return consumers(net, users_of(net(x)))


class Calls(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.a, self.b, self.f = nn.Linear(4, 6), nn.Linear(6, 2), f

    def forward(self, x):
        return self.b(self.f(self.a(x)))


@pytest.mark.parametrize(
    ("f", "reader"),
    [
        (F.relu, "ReLU"),
        (F.relu6, "ReLU6"),
        (lambda x: F.relu(x.transpose(0, 1)).transpose(0, 1), "ReLU"),
        (F.leaky_relu, ""),
        (lambda x: F.relu(x) + x, ""),
        (lambda x: F.relu(x + 1), ""),
    ],
)
def test_the_graph_shows_which_activation_reads_a_layer(f, reader):
    for x in (torch.randn(3, 4), torch.randn(3, 5, 4)):
        assert read_by(Calls(f), x) == {"a": reader, "b": ""}


def test_a_norm_and_a_pool_may_stand_before_it():
    parts = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True)]
    net = nn.Sequential(*parts, nn.Conv2d(4, 2, 1), nn.MaxPool2d(2), nn.ReLU())

    assert read_by(net, torch.randn(2, 1, 8, 8)) == {"0": "", "1": "ReLU", "3": "ReLU"}


def test_what_the_graph_does_not_show_is_unknown():
    net = Calls(F.relu)
    net.a.weight.requires_grad_(False)
    with torch.no_grad():
        unseen = read_by(net, torch.randn(3, 4))

    assert read_by(net, torch.randn(3, 4)) == {"a": None, "b": ""}
    assert unseen == {"a": None, "b": None}


def train(net, *callbacks, x=None, n=1, opt=None, **how):
    """The run of `n` watched steps."""
    opt = opt or torch.optim.SGD(net.parameters(), 0.01, **how)
    with watch(net, opt, *callbacks) as w:
        for _ in range(n):
            opt.zero_grad()
            out = net(torch.randn(8, 4) if x is None else x)
            sum(t.square().mean() for t in (out if isinstance(out, tuple) else [out])).backward()
            opt.step()
    return w.run_record()


def test_activation_stats_tell_what_reads_each_row():
    assert train(Calls(F.relu), ActivationStats()).activations.meta["read_by"] == ["ReLU", ""]
    own = ActivationStats(hook=lambda m, i, o: i[0])  # of inputs it says nothing
    assert "read_by" not in train(Calls(F.relu), own).activations.meta


@pytest.mark.parametrize("every", [1, 4])
def test_what_is_in_no_optimizer_or_has_no_rate_has_not_moved(every):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.0}]
    opt = torch.optim.SGD(groups, 0.1)
    train(net, stats := ParamStats(every=every), n=8, opt=opt)

    want = [True, True, False, False, False, False]
    assert stats.record().meta["moved"] == want
    assert pickle.loads(pickle.dumps(stats)).record() == stats.record()


class InAList(nn.Module):
    """A classic: the layers work, and are no part of the model."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 2)
        self.body = [nn.Linear(4, 6), nn.Linear(6, 6)]
        self.teacher = [nn.Linear(6, 6)]  # hidden on purpose, and runs without gradients
        self.scale = {"all": nn.Parameter(torch.ones(()))}
        self.names = ["a", 1, None]

    def forward(self, x):
        for layer in self.body:
            x = F.relu(layer(x))
        with torch.no_grad():
            self.teacher[0](x)
        return self.head(x) * self.scale["all"]


def hidden(model, params, given):
    """A watched training of `params`; whether the optimizer is given or found."""
    opt, stats = torch.optim.SGD(params, lr=0.1), ActivationStats()
    with watch(model, opt if given else None, stats, ParamStats()) as w:
        for _ in range(12):
            F.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
            opt.step()
            opt.zero_grad()
    return w, stats


@pytest.mark.parametrize("given", [False, True])
def test_layers_in_a_list_are_named_unless_an_optimizer_has_them(given):
    model = InAList()
    w, stats = hidden(model, model.parameters(), given)

    names = [f"body[{i}].{key}" for i in (0, 1) for key in ("weight", "bias")]
    assert stats.record().meta["unregistered"] == [*names, "scale['all']"]
    (finding,) = [f for f in w.diagnose() if f.rule == "unregistered"]
    assert finding.layers == (*names, "scale['all']")
    assert "ModuleList" in finding.fix
    assert pickle.loads(pickle.dumps(stats)).record().meta["unregistered"]

    every = [*model.parameters(), model.scale["all"]]
    w, stats = hidden(model, every + [p for x in model.body for p in x.parameters()], given)
    assert "unregistered" not in stats.record().meta
    assert "unregistered" not in w.diagnose().rules


class ActorAndCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.v = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.pi(x), self.v(x)


class LastFirst(nn.Module):
    """Its layers are registered in another order than they run; one of them runs many times."""

    def __init__(self):
        super().__init__()
        self.head, self.cell = nn.Linear(4, 2), nn.GRUCell(4, 4)
        self.words = nn.Embedding(5, 4)

    def forward(self, x):
        h = torch.zeros(len(x), 4)
        for i in range(x.shape[1]):
            h = self.cell(self.words(x[:, i]), h)
        return self.head(h)


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(4, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize(
    ("net", "x", "expected"),
    [
        (ActorAndCritic(), torch.randn(3, 4), {
            "pi.0.weight": "", "pi.2.weight": "pi.0.weight", "v.0.weight": "",
            "v.2.weight": "v.0.weight"}),
        (LastFirst(), torch.zeros(3, 20, dtype=torch.long), {
            "words.weight": "", "cell.weight_ih": "words.weight", "cell.weight_hh": "",
            "head.weight": "cell.weight_ih"}),
        (LowRank(), torch.randn(3, 4), {"a": "", "b": "a"}),
        (nn.LSTM(4, 5, 2), torch.randn(3, 2, 4), {
            "weight_ih_l0": "", "weight_hh_l0": "", "weight_ih_l1": "weight_ih_l0",
            "weight_hh_l1": "weight_ih_l0"}),
    ],
)  # fmt: skip
def test_the_graph_shows_which_matrix_stands_before_each(net, x, expected):
    assert predecessors(net, users_of(net(x))) == expected


def test_a_residual_block_stands_behind_the_block_before_it():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    found = predecessors(net, users_of(net(torch.randn(2, 3, 8))))

    assert found["layers.1.self_attn.in_proj_weight"] == "layers.0.linear2.weight"
    assert found["layers.0.linear1.weight"] == "layers.0.self_attn.out_proj.weight"


def test_the_matrices_before_each_are_in_the_record_and_its_file(tmp_path):
    whole = train(ActorAndCritic(), ActivationStats())

    for run in (whole, Run.load(whole.save(tmp_path / "run"))):
        assert run.activations.meta["predecessors"]["v.2.weight"] == "v.0.weight"


class Recurs(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 4, 2, dropout=0.3)
        self.one = nn.GRU(4, 4, 1)
        self.drop, self.quiet = nn.Dropout(0.95), nn.Dropout(0.9).eval()

    def forward(self, x):
        return self.quiet(self.drop(self.one(self.rnn(x)[0])[0]))


def test_the_shares_that_layers_drop_are_recorded():
    meta = train(Recurs(), ActivationStats(), x=torch.randn(3, 2, 4)).activations.meta

    assert meta["dropout"] == {"rnn": 0.3, "drop": 0.95}
