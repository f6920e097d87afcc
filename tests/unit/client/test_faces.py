"""The blocking and the asyncio clients have the same public methods, with the same arguments."""

from __future__ import annotations

import inspect

import pytest

import cometmq
from cometmq import aio

FOR_OTHER_PARTS = {
    "Consumer": {"counts", "flow_waits", "is_running", "owned", "rebalance", "subscriptions"}
    | {"run_to_end", "topics"},
    "Producer": {"begin", "choose", "ended", "finished", "make", "observed", "tell", "template"}
    | {"finished_oneway", "make_batch", "open_lane", "port_of", "wire_queue", "wire_topic"},
    "PullConsumer": {"lend"},
}
"""What other modules use of the asyncio clients and users need not know."""


def _public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("name", aio.__all__)
def test_same_names(name: str) -> None:
    known = _public(getattr(aio, name)) - FOR_OTHER_PARTS.get(name, set())
    assert _public(getattr(cometmq, name)) == known


@pytest.mark.parametrize("name", aio.__all__)
def test_same_arguments(name: str) -> None:
    blocking, asynchronous = getattr(cometmq, name), getattr(aio, name)
    for method in sorted(_public(blocking)):
        ours, theirs = getattr(blocking, method), getattr(asynchronous, method)
        if not callable(ours):
            continue
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        ), f"{name}.{method}"
        defaults = [one.default for one in inspect.signature(ours).parameters.values()]
        expected = [one.default for one in inspect.signature(theirs).parameters.values()]
        assert defaults == expected, f"{name}.{method}"


@pytest.mark.parametrize("name", cometmq.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(cometmq, name) is not None


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Prodcer'"):
        cometmq.Prodcer  # noqa: B018
