"""`save` and `load`: a file has weights and optimizer, and a fit goes on from it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from learners import plain, quiet
from processes import in_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from hookkit.callbacks import Callback, SaveModelCallback, SchedulerCallback
from hookkit.errors import OptionError
from hookkit.training import Learner


def learner(folder: Path) -> Any:
    torch.manual_seed(1)
    x = torch.randn(40, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    dls = (DataLoader(data, 8), DataLoader(data, 20))
    return plain(dls, net, loss_func=nn.MSELoss(), opt_func=torch.optim.AdamW, path=folder)


class Dies(Callback):
    """Ends a fit as a machine that is switched off, after what saves."""

    order = 100

    def after_epoch(self) -> None:
        if self.learn.epoch == 1:
            raise KeyboardInterrupt


def state(learn: Any) -> tuple[dict[str, Tensor], Any]:
    return learn.model.state_dict(), learn.opt.state_dict()


def test_an_interrupted_fit_goes_on_from_its_last_epoch(tmp_path: Path) -> None:
    whole, cut, again = (learner(tmp_path) for _ in range(3))
    whole.fit(4)

    with pytest.raises(KeyboardInterrupt):
        cut.fit(4, cbs=[SaveModelCallback(every_epoch=True, with_opt=True), Dies()])
    again.load("model_1")
    again.fit(4, start_epoch=2)

    rows = [*cut.run_record().valid, *again.run_record().valid]
    assert [(r["epoch"], r["step"]) for r in rows] == [(0, 4), (1, 9), (2, 4), (3, 9)]
    torch.testing.assert_close(state(again), state(whole), rtol=1e-4, atol=1e-5)


def test_what_a_schedule_had_set_is_not_loaded_into_the_next_fit(tmp_path: Path) -> None:
    def decay() -> SchedulerCallback:
        return SchedulerCallback(lambda opt, n: LambdaLR(opt, lambda i: 1 - i / n))

    first, later = learner(tmp_path), learner(tmp_path)
    save = SaveModelCallback(monitor="train_loss", every_epoch=True, with_opt=True)
    first.fit_one_cycle(2, 0.5, cbs=[save, decay()])

    later.load("model_0")
    assert later.opt.param_groups[0]["betas"] == (0.9, 0.999)
    later.fit(1, 1.0, cbs=decay())

    assert later.recorder.lrs == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_weights_and_optimizer_are_loaded_or_a_state_dict_alone(tmp_path: Path) -> None:
    learn, other = learner(tmp_path), learner(tmp_path)
    learn.fit(1)
    learn.save("best")

    assert other.load("best") is other
    torch.testing.assert_close(state(other), state(learn), rtol=0, atol=0)

    net = learner(tmp_path).model
    torch.save(net.state_dict(), tmp_path / "net.pth")
    learn.load(tmp_path / "net")
    torch.testing.assert_close(learn.model.state_dict(), net.state_dict(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Missing key"):
        quiet(path=tmp_path).load("best", with_opt=False)


def test_a_file_is_found_as_its_path_is_written_and_has_the_plain_models_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    learn = Learner(None, nn.Linear(2, 1))
    learn.create_opt()
    names = list(learn.model.state_dict())
    learn.model = torch.compile(learn.model, backend="eager")

    file = learn.save("run")

    assert file == Path("models/run.pth")
    assert list(torch.load(file, weights_only=True)["model"]) == names
    for path in ("run", "models/run", file):
        learn.load(path)
    with pytest.raises(OptionError, match=r"load: models/rum\.pth does not exist\..* has run\."):
        learn.load("rum")


def test_the_state_of_another_optimizer_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    learn, other = learner(tmp_path), learner(tmp_path)
    learn.fit(1)
    learn.save("run")
    other.opt_func = torch.optim.SGD
    before = {name: t.clone() for name, t in other.model.state_dict().items()}

    with pytest.raises(OptionError, match=r"another optimizer, with .*'betas'.* this one is SGD"):
        other.load("run")

    torch.testing.assert_close(dict(other.model.state_dict()), before, rtol=0, atol=0)


def saves_and_loads_shards(rank: int, folder: Path) -> None:
    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3))

    def sharded(seed: int) -> Any:
        model = net(seed)
        fully_shard(model)
        return Learner(None, model, path=folder)

    learn, other = sharded(0), sharded(1)
    file = learn.save("run", with_opt=False)
    learn.create_opt()
    with pytest.raises(OptionError, match="the model is sharded, and so is the optimizer's state"):
        learn.save("run")
    torch.distributed.barrier()

    whole = net(0).state_dict()
    torch.testing.assert_close(torch.load(file, weights_only=True)["model"], whole, rtol=0, atol=0)
    other.load("run", with_opt=False)
    for name, t in other.model.state_dict().items():
        torch.testing.assert_close(t.full_tensor(), whole[name], rtol=0, atol=0)


@pytest.mark.ranks
def test_a_sharded_model_is_saved_whole_and_loaded_into_shards(tmp_path: Path) -> None:
    in_ranks(saves_and_loads_shards, tmp_path)
