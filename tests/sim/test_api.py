"""cometmq.testing as somebody uses it who only read its docstring."""

from __future__ import annotations

import random
import textwrap

import cometmq.testing
from cometmq.testing import Answer, Client, Cluster, RouteCache, Target, draw, play
from cometmq.wire.codes import RequestCode
from cometmq.wire.frame import Frame


def test_the_example_of_the_docstring_runs() -> None:
    text = cometmq.testing.__doc__
    assert text is not None
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    assert 8 <= len(lines) <= 12, "ten lines, more or less"
    seen: dict[str, object] = {}
    exec(textwrap.dedent("\n".join(lines)), seen)
    assert isinstance(seen["outcome"], cometmq.testing.Outcome)


def test_all_that_is_promised_is_there() -> None:
    for name in cometmq.testing.__all__:
        assert getattr(cometmq.testing, name) is not None
    assert not hasattr(cometmq.testing, "no_such_name")


class _Watcher:
    """A client that asks for the end of every queue of a topic, again and again."""

    def __init__(self, routes: RouteCache, rng: random.Random) -> None:
        self._routes = routes
        self.ends: dict[Target, int] = {}
        self.next_ms = 0

    @property
    def is_done(self) -> bool:
        return bool(self.ends)

    def told(self, client: Client, frame: Frame) -> None:
        raise AssertionError("nobody talks to a watcher")

    def wake(self, client: Client) -> None:
        self.next_ms = client.now_ms + 200
        for target in self._routes.get(client, "Orders"):
            ext = {"topic": target.topic, "queueId": str(target.queue_id)}

            def answered(answer: Answer, target: Target = target) -> None:
                if answer.frame is not None and answer.is_ok:
                    end = int(answer.frame.ext["offset"])
                    assert end >= self.ends.get(target, 0), "a queue grew shorter"
                    self.ends[target] = end

            client.ask(target.address, RequestCode.GET_MAX_OFFSET, ext, answered)


def test_a_client_of_ones_own_takes_part() -> None:
    made: list[_Watcher] = []

    def make(routes: RouteCache, rng: random.Random) -> _Watcher:
        made.append(_Watcher(routes, rng))
        return made[-1]

    swarm = draw(11, flush="SYNC_FLUSH", only=("delay", "split"))
    cluster = Cluster(11, swarm, roles={"watcher": make})
    cluster.at(500, lambda: cluster.kill("broker-a"))
    cluster.at(600, lambda: cluster.start("broker-a"))
    outcome = play(cluster)
    assert not outcome.problems, outcome.problems
    assert len(made) == 1 and sum(made[0].ends.values()) > 0
    assert set(outcome.faults) <= {"delay", "split"}


def test_what_a_scenario_does_wrong_is_seen() -> None:
    """A disk that loses what was synced, which no fault of the menu does."""
    swarm = draw(11, only=())
    cluster = Cluster(11, swarm)
    files = cluster.nodes["broker-a"].files
    assert files is not None

    def lose_synced_bytes() -> None:
        cluster.kill("broker-a")
        log = files.map("commitlog/00000000000000000000", swarm.brokers[0].config.log_file_bytes)
        log.buffer[:] = bytes(len(log.buffer))
        log.close()
        cluster.start("broker-a")

    cluster.at(1_000, lose_synced_bytes)
    outcome = play(cluster)
    assert outcome.problems and "broker-a" in outcome.problems[0]
