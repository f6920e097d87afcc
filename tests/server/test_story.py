"""One message's story against a real broker: each kind of life, with and without a trace."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import pytest

from cometmq import (
    Admin,
    Consumer,
    Later,
    Message,
    Outcome,
    Producer,
    SimpleConsumer,
    TransactionProducer,
)
from cometmq.cli.main import main
from cometmq.client.story import Event, GroupPart, Story
from cometmq.errors import RequestRefused, UsageError
from cometmq.testing.local import LocalBroker


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    settings = {
        "messageDelayLevel": "1s 2s 1s 1s 1s 1s",
        "recallMessageEnable": "true",
        "transactionTimeOut": "1000",
        "transactionCheckInterval": "1000",
    }
    with LocalBroker(store="memory", settings=settings) as running:
        running.create_topic("orders", 2)
        yield running


def until(claim: Callable[[], object], timeout_s: float = 15) -> None:
    give_up = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < give_up, "it did not come"
        time.sleep(0.02)


def tell(
    broker: LocalBroker, message_id: str, *what: str, topic: str | None = None, s: float = 15
) -> Story:
    """The story, once it has these events: the index and traces come a moment later."""
    with Admin(broker.namesrv) as admin:
        give_up = time.monotonic() + s
        while True:
            with contextlib.suppress(RequestRefused):
                story = admin.story(message_id, topic)
                words = [one.what for one in story.events]
                if all(words.count(one) >= what.count(one) for one in what):
                    return story
            assert time.monotonic() < give_up, f"no {what}: {story if 'story' in dir() else None}"
            time.sleep(0.05)


def event(story: Story, what: str) -> Event:
    (found,) = [one for one in story.events if one.what == what]
    return found


def group(story: Story, name: str) -> GroupPart:
    (found,) = [one for one in story.groups if one.group == name]
    return found


def state_of(broker: LocalBroker, message_id: str, name: str, wanted: str) -> Story:
    """The story once the group's part of it is this: offsets are committed in time."""
    stories: list[Story] = []

    def is_so() -> bool:
        stories.append(tell(broker, message_id))
        return any(one.group == name and one.state == wanted for one in stories[-1].groups)

    with contextlib.suppress(AssertionError):
        until(is_so, 15)
    assert group(stories[-1], name).state == wanted, stories[-1]
    return stories[-1]


def test_a_plain_message_without_any_trace(broker: LocalBroker) -> None:
    with Producer("shop", namesrv=broker.namesrv) as producer:
        sent = producer.send(Message("orders", b"12345"))
    story = tell(broker, sent.message_id, "stored")  # the topic is found
    assert (story.topic, story.state, story.groups) == ("orders", "visible", ())
    assert [one.what for one in story.events] == ["born", "stored"]
    stored = event(story, "stored")
    assert (stored.broker, stored.topic) == (broker.broker_name, "orders")
    assert (stored.queue_id, stored.queue_offset) == (sent.queue.queue_id, sent.queue_offset)
    assert abs(stored.time_ms - time.time() * 1e3) < 30_000
    assert "5 bytes" in event(story, "born").text
    assert len(story.unknown) == 2 and "trace" in story.unknown[0]
    assert tell(broker, sent.offset_id, "stored") == story  # by the other id as well

    seen: list[bytes] = []
    with Consumer("billing", namesrv=broker.namesrv, start="first") as consumer:
        consumer.subscribe("orders", lambda message: seen.append(message.body))
        consumer.start()
        until(lambda: seen)
    part = group(state_of(broker, sent.message_id, "billing", "passed"), "billing")
    assert "filter" in part.text  # nobody is online: it may have been filtered out


def test_a_plain_message_with_traces(broker: LocalBroker) -> None:
    seen: list[bytes] = []
    options = {"namesrv": broker.namesrv, "trace": True}
    with Producer("shop", **options) as producer, Consumer("billing", **options) as consumer:
        consumer.subscribe("orders", lambda message: seen.append(message.body))
        consumer.start()
        sent = producer.send(Message("orders", b"12345"))
        until(lambda: seen)
    story = tell(broker, sent.message_id, "sent", "stored", "given", "handled")
    assert [one.what for one in story.events] == ["born", "sent", "stored", "given", "handled"]
    assert event(story, "sent").group == "shop"
    assert event(story, "handled").group == "billing"
    assert story.unknown == ()
    part = group(story, "billing")
    assert (part.state, part.attempts) == ("acknowledged", 1)


def test_a_delayed_and_a_timed_message(broker: LocalBroker) -> None:
    with Producer("shop", namesrv=broker.namesrv) as producer:
        level = producer.send(Message("orders", b"x", delay_level=2))
        when = datetime.now() + timedelta(seconds=2)
        timed = producer.send(Message("orders", b"x", deliver_at=when))
        far = producer.send(Message("orders", b"x", deliver_at=datetime.now() + timedelta(hours=2)))
        producer.recall("orders", far.recall_handle)
    story = tell(broker, level.message_id, "delayed")
    assert (story.topic, story.state) == ("orders", "delayed")
    delayed = event(story, "delayed")
    assert delayed.until_ms == delayed.time_ms + 2000
    assert event(tell(broker, timed.message_id, "timed"), "timed").until_ms == int(
        when.timestamp() * 1e3
    )
    recalled = tell(broker, far.message_id, "recalled")
    assert recalled.state == "recalled"
    assert [one.what for one in recalled.events] == ["born", "timed", "recalled"]

    story = tell(broker, level.message_id, "delayed", "delivered")
    assert story.state == "visible"
    assert 2000 <= event(story, "delivered").time_ms - delayed.time_ms < 5000
    story = tell(broker, timed.message_id, "timed", "delivered")
    assert event(story, "delivered").time_ms >= int(when.timestamp() * 1e3)


def test_a_message_that_is_retried_and_then_acknowledged(broker: LocalBroker) -> None:
    tries: list[int] = []

    def handle(message: object) -> Later | None:
        tries.append(getattr(message, "reconsume_times", -1))
        return Later(delay_level=1) if len(tries) < 3 else None

    with Producer("shop", namesrv=broker.namesrv) as producer:
        sent = producer.send(Message("orders", b"x"))
    with Consumer("billing", namesrv=broker.namesrv, start="first") as consumer:
        consumer.subscribe("orders", handle)
        consumer.start()
        until(lambda: len(tries) == 1)
        story = tell(broker, sent.message_id, "sent back")
        assert group(story, "billing").state == "retrying"
        back = event(story, "sent back")
        assert (back.group, back.attempt, back.until_ms) == ("billing", 1, back.time_ms + 1000)
        until(lambda: len(tries) == 3)
        story = state_of(broker, sent.message_id, "billing", "acknowledged")
    assert tries == [0, 1, 2]
    assert [one.what for one in story.events] == [
        "born",
        "stored",
        *("sent back", "came back") * 2,
    ]
    assert group(story, "billing").attempts == 3


def test_a_dead_letter_and_sending_it_again(broker: LocalBroker) -> None:
    options = {"namesrv": broker.namesrv, "trace": True}
    with Producer("shop", **options) as producer:
        sent = producer.send(Message("orders", b"x"))
    with Consumer("billing", start="first", max_reconsume_times=1, **options) as consumer:
        consumer.subscribe("orders", lambda message: Later(delay_level=1))
        consumer.start()
        tell(broker, sent.message_id, "dead letter")
    story = tell(broker, sent.message_id, "dead letter", "failed", "failed")
    part = group(story, "billing")
    assert (part.state, part.attempts) == ("dead", 2)
    words = [one.what for one in story.events if one.source == "store"]
    assert words == ["born", "stored", "sent back", "came back", "dead letter"]
    with Admin(broker.namesrv) as admin:
        (letter,) = admin.dead_letters("billing")
        admin.resend_dead_letter(letter, "billing")
    assert "%DLQ%billing" in event(tell(broker, sent.message_id, "resent"), "resent").text


def test_a_popped_message_that_nobody_acknowledges(broker: LocalBroker) -> None:
    with Admin(broker.namesrv) as admin:
        admin.create_group("poppers", retry_max_times=2)
        with Producer("shop", namesrv=broker.namesrv) as producer:
            sent = producer.send(Message("orders", b"7"))
        with SimpleConsumer("poppers", "orders", namesrv=broker.namesrv) as consumer:
            until(lambda: consumer.receive(invisible_s=1, wait_s=1))
            story = tell(broker, sent.message_id, "came back", topic="orders")
            assert "%RETRY%poppers" in event(story, "came back").text
            assert group(story, "poppers").state == "retrying"
            until(lambda: consumer.receive(invisible_s=1, wait_s=1))
            state_of(broker, sent.message_id, "poppers", "passed")
            until(
                lambda: consumer.receive(invisible_s=1, wait_s=1) or admin.dead_letters("poppers")
            )
            until(lambda: admin.dead_letters("poppers"))
    story = tell(broker, sent.message_id, "dead letter", topic="orders")
    assert "never acknowledged" in event(story, "dead letter").text
    assert group(story, "poppers").state == "dead" and group(story, "poppers").attempts >= 2


def test_an_expired_message(broker: LocalBroker) -> None:
    with Admin(broker.namesrv) as admin:
        admin.create_topic("brief", 1, attributes={"expired.topic": "brief-over"})
    with Producer("shop", namesrv=broker.namesrv) as producer:
        brief = Message("brief", b"1", ttl=timedelta(milliseconds=50))
        moved = producer.send(brief)
        left = producer.send(Message("orders", b"2", ttl=timedelta(milliseconds=50)))
    story = tell(broker, moved.message_id, "expired", "moved", topic="brief")
    assert story.state == "expired" and "brief-over" in event(story, "moved").text
    stored = event(story, "stored")
    assert event(story, "expired").time_ms == stored.time_ms + 50
    story = tell(broker, left.message_id, "expired", topic="orders")
    assert story.state == "expired" and "50 ms" in event(story, "expired").text


def test_transactions(broker: LocalBroker) -> None:
    answers = {"asked": Outcome.ROLLBACK}

    def check(message: object) -> Outcome:
        return answers.get(getattr(message, "keys", ["?"])[0], Outcome.UNKNOWN)

    with TransactionProducer("shop", check, namesrv=broker.namesrv) as producer:
        kept = producer.send(Message("orders", b"x"), lambda message: Outcome.COMMIT)
        undone = producer.send(Message("orders", b"x"), lambda message: Outcome.ROLLBACK)
        asked = producer.send(
            Message("orders", b"x", keys="asked"), lambda message: Outcome.UNKNOWN
        )
        open_ = producer.send(Message("orders", b"x"), lambda message: Outcome.UNKNOWN)
        story = tell(broker, kept.message_id, "half", "committed")
        assert (story.topic, story.state) == ("orders", "visible")
        assert event(story, "born").group == "shop"
        story = tell(broker, undone.message_id, "half", "rolled back")
        assert (story.topic, story.state) == ("orders", "rolled back")
        story = tell(broker, asked.message_id, "half", "checked", "rolled back")
        assert story.state == "rolled back"
        assert tell(broker, open_.message_id, "half", "checked").state == "half"


def test_a_message_that_the_filter_leaves_out(broker: LocalBroker) -> None:
    seen: list[bytes] = []
    wants = {"tags": "paid", "sql": None}
    with (
        Producer("shop", namesrv=broker.namesrv) as producer,
        Consumer("tags", namesrv=broker.namesrv, start="first") as by_tag,
        Consumer("sql", namesrv=broker.namesrv, start="first") as by_sql,
    ):
        by_tag.subscribe("orders", wants["tags"], lambda message: seen.append(message.body))
        by_sql.subscribe("orders", lambda message: seen.append(message.body), sql="amount > 5")
        by_tag.start()
        by_sql.start()
        queue = producer.queues("orders")[0]
        left = producer.send(Message("orders", b"left out", tags="made"), queue=queue)
        paid = Message("orders", b"paid", tags="paid", properties={"amount": "7"})
        taken = producer.send(paid, queue=queue)
        until(lambda: len(seen) == 2)
        for name in ("tags", "sql"):
            state_of(broker, left.message_id, name, "filtered")
            state_of(broker, taken.message_id, name, "acknowledged")


def test_what_nobody_knows(broker: LocalBroker) -> None:
    with Admin(broker.namesrv) as admin:
        with pytest.raises(RequestRefused, match="NOBODY"):
            admin.story("NOBODY")
        with pytest.raises(RequestRefused, match="orders"):
            admin.story("NOBODY", "orders")
        with pytest.raises(UsageError):
            admin.story("two words")


def test_the_command(broker: LocalBroker, capsys: pytest.CaptureFixture[str]) -> None:
    with Producer("shop", namesrv=broker.namesrv) as producer:
        sent = producer.send(Message("orders", b"x", delay_level=2))
    tell(broker, sent.message_id, "delayed")
    line = ["message", "story", "--namesrv", broker.namesrv, sent.message_id]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert f"message {sent.message_id} of topic orders: delayed" in shown
    assert "waits at delay level 2, due 20" in shown
    assert "not known:" in shown
    assert main([*line, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "delayed"
    assert [one["what"] for one in told["events"]] == ["born", "delayed"]
    assert main([*line[:-1], "NOBODY"]) == 1
    assert "NOBODY" in capsys.readouterr().err


def test_the_command_without_a_name_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    assert main(["message", "story", "X"]) == 2
    assert "NAMESRV_ADDR" in capsys.readouterr().err
