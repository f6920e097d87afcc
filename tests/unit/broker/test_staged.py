"""transientStorePoolEnable, as clients meet it."""

from __future__ import annotations

import pytest

from .conftest import Benches
from .harness import Bench, bodies_of

STAGED = {"is_staged": True, "stage_count": 2, "stage_bytes": 64 * 1024}


@pytest.fixture
def staged(benches: Benches) -> Bench:
    bench = benches(**STAGED)
    bench.create_topic()
    bench.sent(body=b"first")  # nothing was committed for a while: this one is, at once
    return bench


def test_a_message_is_seen_once_it_is_committed(staged: Bench) -> None:
    assert bodies_of(staged.pull()) == [b"first"]
    staged.sent(body=b"second")
    assert bodies_of(staged.pull()) == [b"first"]
    assert staged.runtime()["remainHowManyDataToCommit"] != "0 B"
    staged.advance(199)
    assert bodies_of(staged.pull()) == [b"first"]
    staged.advance(1)
    assert bodies_of(staged.pull()) == [b"first", b"second"]
    assert staged.runtime()["remainHowManyDataToCommit"] == "0 B"


def test_a_held_pull_is_woken_by_the_commit(staged: Bench) -> None:
    opaque = staged.hold(offset=1)
    staged.sent(body=b"second")
    assert staged.answer(opaque) is None
    staged.advance(200)
    answer = staged.answer(opaque)
    assert answer is not None and bodies_of(answer) == [b"second"]


def test_no_free_buffer_is_busy_until_a_commit(
    staged: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = []
    carry_out = staged._flush
    monkeypatch.setattr(staged, "_flush", commits.append)
    answer = staged.send(body=b"x" * 10_000)
    while answer.code == 0:
        answer = staged.send(body=b"x" * 10_000)
    assert answer.code == 2
    for word in ("[REJECTREQUEST]", "transientStorePoolSize", "all 2 buffers"):
        assert word in str(answer.remark)
    assert len(commits) == 1, "one commit at a time"
    monkeypatch.undo()
    carry_out(commits[0])
    assert staged.send(body=b"x" * 10_000).code == 0


def test_a_failed_commit_refuses_all_that_follows(
    staged: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out = staged._flush
    monkeypatch.setattr(staged, "_flush", lambda effect: carry_out(effect, "No space left"))
    staged.sent(body=b"lost")
    staged.advance(200)
    answer = staged.send()
    assert answer.code == 14
    assert "No space left" in str(answer.remark)
    assert bodies_of(staged.pull()) == [b"first"]


def test_an_end_and_a_crash(benches: Benches) -> None:
    bench = benches(**STAGED)
    bench.create_topic()
    bench.sent(body=b"first")
    bench.sent(body=b"second")
    bench.close()
    bench = benches(**STAGED)
    assert bodies_of(bench.pull()) == [b"first", b"second"]
    bench.sent(body=b"third")
    bench.sent(body=b"lost")
    bench.crash()
    bench = benches(**STAGED)
    assert bodies_of(bench.pull()) == [b"first", b"second", b"third"]
