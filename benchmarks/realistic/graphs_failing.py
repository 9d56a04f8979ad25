"""Networks on graphs that learn badly or not at all."""

from .graphs import gcn_communities
from .trials import Watch, failing


@failing("a dropout of 0.95", names=("dropout",), trace=True)
def gcn_communities_dropout(watch: Watch) -> float:
    return gcn_communities(watch, rate=0.95)
