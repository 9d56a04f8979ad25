"""Captum's hooks together with hookkit's hooks on one model."""

import pytest
import torch
from hooked import n_hooks
from torch import Tensor, nn

from hookkit.edits import edit_output, scale
from hookkit.edits.swapping import Catcher, swap
from hookkit.hooks import hook_output, hook_outputs
from hookkit.hooks.selection import select
from hookkit.inspection.features import feature_extractor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.act1 = nn.ReLU()
        self.act2 = nn.ReLU()
        self.hidden = nn.Linear(4 * 36, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.conv(x))
        return self.head(self.act2(self.hidden(x.flatten(1))))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 2 * 36).reshape(2, 1, 6, 6)


def attributions(net: Net, x: Tensor) -> dict[str, Tensor]:
    attr = pytest.importorskip("captum.attr")
    return {
        "integrated": attr.IntegratedGradients(net).attribute(x, target=1, n_steps=5),
        "layer": attr.LayerActivation(net, net.hidden).attribute(x),
        "gradcam": attr.LayerGradCam(net, net.conv).attribute(x, target=1),
        "layer_ig": attr.LayerIntegratedGradients(net, net.act1).attribute(x, target=1, n_steps=5),
        "deeplift": attr.DeepLift(net).attribute(x, target=1),
        "guided": attr.GuidedBackprop(net).attribute(x, target=1),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [False, True])
def test_captum_gives_the_same_while_we_capture(net: Net, x: Tensor, grad: bool) -> None:
    alone = attributions(net, x)

    with hook_outputs(select(net), grad=grad) as h:
        together = attributions(net, x)

    torch.testing.assert_close(together, alone, rtol=0, atol=0)
    assert all(stored is not None for stored in h.stored)
    assert n_hooks(net) == 0


@pytest.mark.filterwarnings("ignore")
def test_our_captures_are_right_while_captum_sees_edits_swaps_and_features(
    net: Net, x: Tensor
) -> None:
    attr = pytest.importorskip("captum.attr")
    wanted = net.hidden(net.act1(net.conv(x)).flatten(1)).detach()
    of_hidden = attr.LayerActivation(net, net.hidden)

    with hook_output(net.hidden) as h:
        captum = of_hidden.attribute(x)
    with edit_output(net.hidden, scale(2)):
        edited = of_hidden.attribute(x)
    with swap(net, {"hidden": Catcher}) as new:
        attr.IntegratedGradients(net).attribute(x, target=1, n_steps=5)
    extract = feature_extractor(net, "hidden")
    saliency = attr.Saliency(lambda x: extract(x)["hidden"]).attribute(x, target=3, abs=False)

    torch.testing.assert_close(h.stored, wanted)
    torch.testing.assert_close(captum.detach(), wanted)
    torch.testing.assert_close(edited.detach(), 2 * wanted)
    assert new["hidden"].calls
    x = x.clone().requires_grad_()
    hidden = net.hidden(net.act1(net.conv(x)).flatten(1))
    torch.testing.assert_close(saliency, torch.autograd.grad(hidden[:, 3].sum(), x)[0])
