"""A whole cluster in one thread, under a seed: for tests of CometMQ and of programs around it.

Real name servers, brokers and stores; network, disks and clocks are simulated. The same seed is
the same run, everywhere. A run never raises for what it finds: look at `Outcome.problems`.

    from cometmq.testing import Cluster, draw, play, run_seed

    outcome = run_seed(7)  # a cluster, its traffic and its faults, all drawn from the seed
    assert not outcome.problems, outcome.problems

    cluster = Cluster(7, draw(7, flush="SYNC_FLUSH", only=()))  # a scenario of your own
    cluster.at(700, lambda: cluster.lose_power("broker-a"))
    cluster.at(900, lambda: cluster.start("broker-a"))
    outcome = play(cluster)
    assert not outcome.problems and outcome.acked > 0

`Cluster(..., roles={"mine": make})` adds a client of your own: make(routes, rng) returns a `Role`,
whose `wake` asks by `Client.ask`. Whoever sends messages puts them into `client.history.sent`
first, under the token that their body begins with ("token|..."): what nobody sent is a problem.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cometmq.testing.client import Answer, Client, Role, RouteCache, Target
    from cometmq.testing.cluster import Cluster, MakeRole, Outcome
    from cometmq.testing.history import History, Sent
    from cometmq.testing.local import LocalBroker
    from cometmq.testing.proxy import Proxy
    from cometmq.testing.simulate import describe, play, run_for, run_seed
    from cometmq.testing.swarm import FAULTS, LATER_FAULTS, Swarm, draw

__all__ = [
    "FAULTS",
    "LATER_FAULTS",
    "Answer",
    "Client",
    "Cluster",
    "History",
    "LocalBroker",
    "MakeRole",
    "Outcome",
    "Proxy",
    "Role",
    "RouteCache",
    "Sent",
    "Swarm",
    "Target",
    "describe",
    "draw",
    "play",
    "run_for",
    "run_seed",
]

_HOMES = {
    "client": ("Answer", "Client", "Role", "RouteCache", "Target"),
    "cluster": ("Cluster", "MakeRole", "Outcome"),
    "history": ("History", "Sent"),
    "local": ("LocalBroker",),
    "proxy": ("Proxy",),
    "simulate": ("describe", "play", "run_for", "run_seed"),
    "swarm": ("FAULTS", "LATER_FAULTS", "Swarm", "draw"),
}


def __getattr__(name: str) -> Any:
    """Names are imported when first used: the pytest plugin below here is loaded by every run of
    pytest, and `python -m cometmq.testing.simulate` must not be imported twice."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
