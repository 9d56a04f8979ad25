"""Networks on graphs that learn badly or not at all."""

from .graphs import gat_communities, gcn_communities, molecule_energy, sage_communities
from .trials import Watch, failing


@failing("a dropout of 0.95", names=("dropout",), trace=True)
def gcn_communities_dropout(watch: Watch) -> float:
    return gcn_communities(watch, rate=0.95)


@failing("16 layers: all nodes alike", names=("representation_collapse", "vanishing"), trace=True)
def gcn_communities_16_layers(watch: Watch) -> float:
    return gcn_communities(watch, depth=16, rate=0.0)


@failing("four layers over a raw adjacency", names=("exploding", "initial_loss"), trace=True)
def gcn_communities_raw(watch: Watch) -> float:
    return gcn_communities(watch, raw=True)


@failing("features divided by themselves: all 1", names=("representation_collapse",), trace=True)
def gcn_communities_constant(watch: Watch) -> float:
    return gcn_communities(watch, constant=True)


@failing("a weight decay of 0.3 inside Adam", names=("weight_decay",), trace=True)
def gcn_communities_decay(watch: Watch) -> float:
    return gcn_communities(watch, decay=0.3)


@failing("a softmax over heads, not neighbours", names=("softmax_dim",), trace=True)
def gat_communities_softmax_heads(watch: Watch) -> float:
    return gat_communities(watch, dim=2)


@failing("a learning rate of 1 with Adam", names=("lr_too_high",), trace=True)
def gat_communities_lr_1(watch: Watch) -> float:
    return gat_communities(watch, lr=1.0)


@failing("labels are shuffled in each batch", names=(), trace=False)
def sage_communities_labels(watch: Watch) -> float:
    return sage_communities(watch, shuffled=True)


@failing("energies of -4000 as they are", names=("target_scale",), trace=True)
def molecule_energy_raw(watch: Watch) -> float:
    return molecule_energy(watch, raw=True)


@failing("(N, 1) minus (N,) in the loss", names=("broadcast",), trace=True)
def molecule_energy_broadcast(watch: Watch) -> float:
    return molecule_energy(watch, flat=False)


@failing("a learning rate of 3e-6", names=("lr_too_low",), trace=True)
def molecule_energy_lr_low(watch: Watch) -> float:
    return molecule_energy(watch, lr=3e-6)
