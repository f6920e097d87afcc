"""What an Admin must do against any server: CometMQ's broker, and Apache's as the control.

Each scenario takes a started Admin on a cluster with one broker, makes its own topics and groups,
and asserts. tests/server/test_admin.py and tests/interop/test_python_admin.py run them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

import pytest

from cometmq.client.admin import Admin, UnknownName, read_id
from cometmq.client.connection import Connection
from cometmq.client.session import Options, Session
from cometmq.errors import NoRoute, RequestRefused, UsageError
from cometmq.message import MessageQueue
from cometmq.wire import fastjson, properties
from cometmq.wire.bodies import ConsumerOfHeartbeat, Subscription, queue_key
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import Frame, reply_to
from cometmq.wire.headers import (
    SendBackHeader,
    SendHeader,
    SendResponse,
    parse,
    send_v2_ext,
    to_ext,
)

WAIT_S = 10
T = TypeVar("T")
Scenario = Callable[[Admin], Awaitable[None]]


async def the_broker(admin: Admin) -> tuple[str, str, str]:
    """(cluster, name, address) of the only broker."""
    [(cluster, brokers)] = (await admin.clusters()).items()
    [(name, addresses)] = brokers.items()
    return cluster, name, addresses[0]


async def send(
    admin: Admin, topic: str, body: bytes, queue_id: int = 0, /, **table: str
) -> SendResponse:
    _, name, address = await the_broker(admin)
    header = SendHeader(
        producerGroup="admin-test",
        topic=topic,
        defaultTopic="TBW102",
        defaultTopicQueueNums=4,
        queueId=queue_id,
        sysFlag=0,
        bornTimestamp=int(time.time() * 1000),
        flag=7,
        properties=properties.build(table),
        bname=name,
    )
    code = RequestCode.SEND_MESSAGE_V2
    answer = await admin.session.connections.call(address, code, send_v2_ext(header), body)
    return parse(SendResponse, answer.ext)


async def until(
    what: Callable[[], Awaitable[T]], is_so: Callable[[T], bool], *, timeout_s: float = WAIT_S
) -> T:
    """Ask until it is so: brokers index and register a moment after they answer."""
    give_up = time.monotonic() + timeout_s
    while True:
        found = await what()
        if is_so(found):
            return found
        assert time.monotonic() < give_up, f"not so in {timeout_s} s: {found!r}"
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def member(admin: Admin, group: str, topic: str) -> AsyncIterator[Session]:
    """Somebody online in a group, who says that it reads queue 0."""
    _, broker, _ = await the_broker(admin)
    session = Session(Options(namesrv=admin.session.options.namesrv))
    subscription = Subscription(topic, "paid || due", 5, "TAG", ("due", "paid"), (99828, 3433164))
    session.consumers = lambda: [
        ConsumerOfHeartbeat(
            group, "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET", (subscription,)
        )
    ]
    session.producer_groups.add("admin-producers")

    def running(connection: Connection, frame: Frame) -> Frame:
        answer = reply_to(frame, 0)
        fields = {"cachedMsgCount": 3, "commitOffset": 2, "droped": False, "locked": True}
        answer.body = fastjson.dumps(
            {
                "jstack": "asleep" if frame.ext.get("jstackEnable") == "true" else None,
                "mqTable": {queue_key(topic, broker, 0): fields},
                "properties": {"PROP_CONSUME_TYPE": "CONSUME_PASSIVELY"},
                "statusTable": {topic: {"consumeOKTPS": 1.5, "consumeFailedMsgs": 2}},
                "subscriptionSet": [{"topic": topic, "subString": "paid || due", "subVersion": 5}],
            }
        )
        return answer

    session.answers[RequestCode.GET_CONSUMER_RUNNING_INFO] = running
    await session.start()
    try:
        await session.routes.need(topic)
        await session.beat()
        yield session
    finally:
        await session.close()


# ------------------------------------------------------------------------------------------ topics


async def topics_live_and_die(admin: Admin) -> None:
    cluster, broker, _ = await the_broker(admin)
    assert await admin.create_topic("admin-topic", 5, cluster=cluster) == [broker]
    route = await admin.topic_route("admin-topic")
    assert len(route.to_send) == len(route.to_read) == 5
    assert route.brokers[broker].cluster == cluster
    found = (await admin.topic("admin-topic"))[broker]
    assert (found.read_queues, found.write_queues, found.perm) == (5, 5, "rw")
    assert "admin-topic" in await admin.topics()
    assert "TBW102" not in await admin.topics()
    assert "TBW102" in await admin.topics(with_system=True)

    assert await admin.update_topic("admin-topic", write_queues=7, read_queues=9) == [broker]
    found = (await admin.topic("admin-topic"))[broker]
    assert (found.read_queues, found.write_queues, found.perm) == (9, 7, "rw")
    await admin.update_topic("admin-topic", perm="r")
    assert (await admin.topic("admin-topic"))[broker].perm == "r"
    assert (await admin.topic("admin-topic"))[broker].read_queues == 9

    assert await admin.delete_topic("admin-topic") == [broker]
    assert "admin-topic" not in await admin.topics(with_system=True)
    with pytest.raises(NoRoute, match="does not know it"):
        await admin.topic("admin-topic")


async def attributes_of_topics_are_kept(admin: Admin) -> None:
    _, broker, _ = await the_broker(admin)
    await admin.create_topic("admin-attributes", 1, attributes={"message.type": "FIFO"})
    found = (await admin.topic("admin-attributes"))[broker].attributes
    if not found:
        return  # 4.9 has none
    assert found == {"message.type": "FIFO"}
    await admin.update_topic("admin-attributes", 2)
    assert (await admin.topic("admin-attributes"))[broker].attributes == {"message.type": "FIFO"}
    await admin.update_topic("admin-attributes", attributes={"message.type": None})
    assert (await admin.topic("admin-attributes"))[broker].attributes == {}


async def ordered_topics_are_told_to_name_servers(admin: Admin) -> None:
    _, broker, _ = await the_broker(admin)
    await admin.create_topic("admin-ordered", 3, order=True)
    assert await admin.get_kv("ORDER_TOPIC_CONFIG", "admin-ordered") == f"{broker}:3"
    await admin.delete_topic("admin-ordered")
    assert await admin.get_kv("ORDER_TOPIC_CONFIG", "admin-ordered") is None


async def names_that_do_not_exist_are_answered_with_those_that_do(admin: Admin) -> None:
    cluster, broker, _ = await the_broker(admin)
    with pytest.raises(
        UnknownName, match=f"cluster 'nowhere' is unknown: known clusters: {cluster}"
    ):
        await admin.create_topic("x", cluster="nowhere")
    with pytest.raises(UnknownName, match=f"broker 'nobody' is unknown: known brokers: {broker}"):
        await admin.broker_status("nobody")
    with pytest.raises(UnknownName, match="known brokers"):
        await admin.wipe_write_perm("nobody")
    await admin.create_group("admin-known")
    with pytest.raises(UnknownName, match=r"group 'admin-unknown' is unknown: .*admin-known"):
        await admin.group("admin-unknown")
    with pytest.raises(UnknownName):
        await admin.consumer_progress("admin-unknown")
    with pytest.raises(UnknownName):
        await admin.dead_letters("admin-unknown")
    await admin.create_topic("admin-orders", 1)
    with pytest.raises(NoRoute, match="admin-orders"):
        await admin.topic_stats("admin-order")
    with pytest.raises(RequestRefused) as refused:
        await admin.consumer_connections("admin-known")
    assert refused.value.code == ResponseCode.CONSUMER_NOT_ONLINE
    with pytest.raises(RequestRefused):
        await admin.producer_connections("admin-nobody")
    with pytest.raises(UsageError, match="at least one"):
        await admin.create_topic("x", 0)


async def topic_stats_tell_what_is_there(admin: Admin) -> None:
    await admin.create_topic("admin-stats", 2)
    _, broker, _ = await the_broker(admin)
    for number in range(3):
        await send(admin, "admin-stats", b"%d" % number, 1)
    first, second = MessageQueue("admin-stats", broker, 0), MessageQueue("admin-stats", broker, 1)

    stats = await until(lambda: admin.topic_stats("admin-stats"), lambda one: one.count == 3)
    assert set(stats.queues) == {first, second}
    assert (stats.queues[second].min_offset, stats.queues[second].max_offset) == (0, 3)
    stored = stats.queues[second].last_update
    assert stored is not None
    assert abs((datetime.now(UTC) - stored).total_seconds()) < 60
    assert stats.queues[first].last_update is None


# ------------------------------------------------------------------------------------------ groups


async def groups_live_and_die(admin: Admin) -> None:
    _, broker, _ = await the_broker(admin)
    assert await admin.create_group("admin-group", retry_max_times=3) == [broker]
    assert "admin-group" in await admin.groups()
    assert "TOOLS_CONSUMER" not in await admin.groups()
    assert "TOOLS_CONSUMER" in await admin.groups(with_system=True)
    found = (await admin.group("admin-group"))[broker]
    assert (found.retry_max_times, found.consume_broadcast, found.consume) == (3, True, True)
    assert await admin.update_group("admin-group", consume_broadcast=False) == [broker]
    found = (await admin.group("admin-group"))[broker]
    assert (found.retry_max_times, found.consume_broadcast, found.consume) == (3, False, True)
    assert await admin.delete_group("admin-group") == [broker]
    assert "admin-group" not in await admin.groups()
    with pytest.raises(UnknownName):
        await admin.update_group("admin-group", consume=False)


async def members_and_their_progress_are_seen(admin: Admin) -> None:
    _, broker, address = await the_broker(admin)
    await admin.create_topic("admin-seen", 2)
    await admin.create_group("admin-seers")
    for _ in range(3):
        await send(admin, "admin-seen", b"x")
    async with member(admin, "admin-seers", "admin-seen") as session:
        for queue_id, offset in ((0, 2), (1, 0)):
            ext = {
                "consumerGroup": "admin-seers",
                "topic": "admin-seen",
                "queueId": str(queue_id),
                "commitOffset": str(offset),
            }
            code = RequestCode.UPDATE_CONSUMER_OFFSET
            await session.connections.call(address, code, ext)
        online = await admin.consumer_connections("admin-seers")
        [client] = online.clients
        assert client.client_id == session.client_id
        assert (client.language, client.brokers) == ("PYTHON", (broker,))
        assert client.version_name == "5.3.3"
        assert online.message_model == "CLUSTERING"
        assert online.consume_type == "CONSUME_PASSIVELY"
        assert online.subscriptions["admin-seen"].expression == "paid || due"
        [producer] = await admin.producer_connections("admin-producers", "admin-seen")
        assert producer.client_id == session.client_id

        running = await admin.consumer_running_info("admin-seers", client.client_id)
        [(queue, state)] = running.queues.items()
        assert queue == MessageQueue("admin-seen", broker, 0)
        assert (state.cached_count, state.committed_offset, state.is_locked) == (3, 2, True)
        assert running.rates["admin-seen"]["consumeOKTPS"] == 1.5
        assert running.stacks == ""
        with_stacks = await admin.consumer_running_info(
            "admin-seers", client.client_id, with_stacks=True
        )
        assert with_stacks.stacks == "asleep"
        with pytest.raises(UnknownName, match="known clients"):
            await admin.consumer_running_info("admin-seers", "nobody@1")

        progress = await admin.consumer_progress("admin-seers", "admin-seen")
        assert progress.lag == 1
        by_queue = {one.queue.queue_id: one for one in progress.queues}
        assert (by_queue[0].broker_offset, by_queue[0].consumer_offset) == (3, 2)
        assert by_queue[0].client_id == session.client_id
        assert by_queue[1].client_id == ""
        assert by_queue[0].last_consumed is not None
        assert "admin-seers" in await admin.topic_groups("admin-seen")
    found = await admin.committed_offsets("admin-seers", "admin-seen")
    assert found[MessageQueue("admin-seen", broker, 0)] == 2
    progress = await admin.consumer_progress("admin-seers")
    assert {one.queue.topic for one in progress.queues} >= {"admin-seen"}


# ---------------------------------------------------------------------------------------- messages


async def messages_are_found(admin: Admin) -> None:
    _, broker, _ = await the_broker(admin)
    await admin.create_topic("admin-found", 2)
    began_ms = int(time.time() * 1000) - 1000
    ids = []
    for number in range(5):
        unique = f"7F0000010001{number:020X}"
        sent = await send(
            admin,
            "admin-found",
            b"body %d" % number,
            number % 2,
            UNIQ_KEY=unique,
            KEYS=f"order{number} all",
            TAGS="paid",
        )
        ids.append((unique, sent.msgId))
        await asyncio.sleep(0.02)
    found = await until(
        lambda: admin.messages_by_key("admin-found", "all"), lambda found: len(found) == 5
    )
    assert [one.body for one in found] == [b"body %d" % number for number in range(5)]
    assert len(await admin.messages_by_key("admin-found", "all", most=2)) == 2
    [one] = await admin.messages_by_key("admin-found", "order3")
    assert (one.message_id, one.tags, one.broker, one.flag) == (ids[3][0], "paid", broker, 7)
    assert await admin.messages_by_key("admin-found", "nothing") == []

    unique, offset_id = ids[2]
    assert read_id(unique).kind == "unique"
    assert read_id(offset_id).kind == "offset"
    assert (await admin.message(unique, "admin-found")).body == b"body 2"
    assert (await admin.message(offset_id)).body == b"body 2"
    assert (await admin.message(offset_id)).queue == MessageQueue("admin-found", broker, 0)
    assert (await admin.message(offset_id, "admin-found")).message_id == unique
    with pytest.raises(UsageError, match="unique id"):
        await admin.message(unique)
    with pytest.raises(RequestRefused) as refused:
        await admin.message("0" * 30 + "AB", "admin-found")
    assert refused.value.code == ResponseCode.QUERY_NOT_FOUND
    with pytest.raises(RequestRefused, match="offset id"):
        await admin.message(offset_id[:-8] + "7FFFFF00")

    queue = MessageQueue("admin-found", broker, 0)
    read = await admin.queue_messages(queue)
    assert [one.body for one in read] == [b"body 0", b"body 2", b"body 4"]
    assert [one.queue_offset for one in await admin.queue_messages(queue, 1, 2)] == [1]
    assert [one.queue_offset for one in await admin.queue_messages(queue, 1, most=1)] == [1]
    assert await admin.queue_messages(queue, 3) == []
    with pytest.raises(UsageError, match="2 readable queues"):
        await admin.queue_messages(MessageQueue("admin-found", broker, 2))

    timed = await admin.messages_by_time("admin-found", began_ms)
    assert [one.body for one in timed] == [one.body for one in found]
    third = datetime.fromtimestamp(found[2].store_ms / 1e3, UTC)
    timed = await admin.messages_by_time("admin-found", third, found[4].store_ms)
    assert [one.body for one in timed] == [b"body 2", b"body 3"]


# ----------------------------------------------------------------------------------------- offsets


async def offsets_of_an_offline_group_are_moved(admin: Admin) -> None:
    _, broker, _ = await the_broker(admin)
    await admin.create_topic("admin-moved", 2)
    await admin.create_group("admin-movers")
    first, second = (MessageQueue("admin-moved", broker, number) for number in (0, 1))
    for number in range(6):
        await send(admin, "admin-moved", b"x", number % 2)
        if number % 2:
            await asyncio.sleep(0.1)
    read = await until(
        lambda: admin.messages_by_time("admin-moved", 0), lambda found: len(found) == 6
    )
    stored = [one.store_ms for one in read]

    async def moved(to: datetime | int | str, expected: tuple[int, int], **more: int) -> None:
        found = await admin.reset_offset("admin-movers", "admin-moved", to, **more)  # type: ignore[arg-type]
        if "queue" in more:
            assert found == {second: expected[1]}
        else:
            assert found == {first: expected[0], second: expected[1]}
        at = await admin.committed_offsets("admin-movers", "admin-moved")
        assert (at.get(first, 0), at.get(second, 0)) == expected

    await moved("latest", (3, 3))
    await moved("earliest", (0, 0))
    # Just before a pair: 4.9 gives the message that is nearest in time, not the next one.
    await moved(stored[4] - 1, (2, 2))
    await moved(datetime.fromtimestamp(stored[2] / 1e3 - 0.001, UTC), (1, 1))
    await moved(3, (1, 3), queue=1)
    with pytest.raises(UsageError, match="it holds 0 to 3"):
        await admin.reset_offset("admin-movers", "admin-moved", 4, queue=1)
    with pytest.raises(UsageError, match="no readable queue"):
        await admin.reset_offset("admin-movers", "admin-moved", 0, queue=2)
    with pytest.raises(UsageError, match="earliest"):
        await admin.reset_offset("admin-movers", "admin-moved", "yesterday")  # type: ignore[arg-type]


async def offsets_of_a_group_online_are_moved(admin: Admin) -> None:
    """By the broker: CometMQ and 5.2 or later do it themselves, 4.9 tells the members (220)."""
    _, broker, address = await the_broker(admin)
    await admin.create_topic("admin-live", 1)
    await admin.create_group("admin-living")
    for _ in range(4):
        await send(admin, "admin-live", b"x")
    await until(lambda: admin.messages_by_time("admin-live", 0), lambda found: len(found) == 4)
    queue = MessageQueue("admin-live", broker, 0)
    async with member(admin, "admin-living", "admin-live") as session:
        ext = {"consumerGroup": "admin-living", "topic": "admin-live", "queueId": "0"}
        code = RequestCode.UPDATE_CONSUMER_OFFSET
        await session.connections.call(address, code, {**ext, "commitOffset": "3"})
        told: list[Frame] = []

        def reset(_: Connection, frame: Frame) -> None:
            told.append(frame)

        session.answers[RequestCode.RESET_CONSUMER_CLIENT_OFFSET] = reset
        moved = await admin.reset_offset("admin-living", "admin-live", "earliest")
        assert moved == {queue: 0}
        at = await admin.committed_offsets("admin-living", "admin-live")
        moves_itself = at[queue] == 0
        if moves_itself:
            assert await admin.reset_offset("admin-living", "admin-live", 1, queue=0) == {queue: 1}
            assert await admin.committed_offsets("admin-living", "admin-live") == {queue: 1}
        else:  # it is the members' work, and they can't be told of one queue
            [frame] = await until(lambda: asyncio.sleep(0, told), bool)
            assert (frame.ext["group"], frame.ext["topic"]) == ("admin-living", "admin-live")
            with pytest.raises(RequestRefused, match="stop them first"):
                await admin.reset_offset("admin-living", "admin-live", 1, queue=queue)


# ------------------------------------------------------------------------------------ dead letters


async def dead_letters_are_read_and_sent_again(admin: Admin) -> None:
    await admin.create_topic("admin-source", 1)
    await admin.create_group("admin-failing")
    assert await admin.dead_letters("admin-failing") == []
    _, broker, address = await the_broker(admin)
    unique = "7F0000010001" + "D" * 20
    table = {"UNIQ_KEY": unique, "KEYS": "order9 dead", "TAGS": "paid", "colour": "blue"}
    await send(admin, "admin-source", b"bad news", 0, **table)
    [sent] = await admin.queue_messages(MessageQueue("admin-source", broker, 0))
    back = SendBackHeader(sent.log_offset, "admin-failing", -1, unique, "admin-source", False, 16)
    code = RequestCode.CONSUMER_SEND_MSG_BACK
    answer = await admin.session.connections.request(address, code, to_ext(back))
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:  # what 36 would do, by hand
        await admin.create_topic("%DLQ%admin-failing", 1)
        more = {"RETRY_TOPIC": "admin-source", "ORIGIN_MESSAGE_ID": sent.offset_id, "DELAY": "0"}
        await send(admin, "%DLQ%admin-failing", b"bad news", 0, **table, **more)
    else:
        assert answer.code == 0, answer
    [letter] = await until(lambda: admin.dead_letters("admin-failing"), bool)
    assert (letter.body, letter.stored_topic) == (b"bad news", "%DLQ%admin-failing")

    result = await admin.resend_dead_letter(letter, "admin-failing")
    assert result.queue == MessageQueue("admin-source", broker, 0)
    assert (result.queue_offset, result.message_id) == (1, unique)
    [again] = await admin.queue_messages(result.queue, 1)
    assert (again.body, again.tags, again.keys) == (b"bad news", "paid", ["order9", "dead"])
    assert (again.properties["colour"], again.message_id) == ("blue", unique)
    assert (again.reconsume_times, again.flag) == (0, 7)
    assert again.properties["ORIGIN_MESSAGE_ID"] == sent.offset_id
    assert again.properties["DLQ_RESENT_FROM"] == f"%DLQ%admin-failing@{letter.offset_id}"
    assert not {"RETRY_TOPIC", "DELAY", "REAL_TOPIC"} & set(again.properties)
    by_id = await admin.resend_dead_letter(letter.offset_id, "admin-failing")
    assert by_id.queue_offset == 2
    with pytest.raises(UsageError, match="stored in 'admin-source'"):
        await admin.resend_dead_letter(sent, "admin-failing")
    await admin.delete_group("admin-failing")
    assert "%DLQ%admin-failing" not in await admin.topics(with_system=True)


# ----------------------------------------------------------------------------------------- cluster


async def brokers_tell_of_themselves_and_are_changed(admin: Admin) -> None:
    cluster, broker, address = await the_broker(admin)
    status = await admin.broker_status(broker)
    assert int(status["bootTimestamp"]) > 0
    assert (await admin.broker_status(address))["bootTimestamp"] == status["bootTimestamp"]
    config = await admin.broker_config(broker)
    assert config["brokerName"] == broker
    changed = await admin.update_broker_config({"fileReservedTime": "49"}, broker)
    assert changed == [broker]
    assert (await admin.broker_config(address))["fileReservedTime"] == "49"
    assert await admin.update_broker_config({"fileReservedTime": "50"}, cluster=cluster) == [broker]
    with pytest.raises(UsageError, match="a line"):
        await admin.update_broker_config({"a": "b\nc=d"})
    [(at, settings)] = (await admin.name_server_config()).items()
    assert at == str(admin.session.names)
    assert "listenPort" in settings


async def kv_entries_live_and_die(admin: Admin) -> None:
    assert await admin.get_kv("admin-space", "a") is None
    assert await admin.list_kv("admin-space") == {}
    await admin.put_kv("admin-space", "a", "1")
    await admin.put_kv("admin-space", "b", "2 = two")
    assert await admin.get_kv("admin-space", "a") == "1"
    assert await admin.list_kv("admin-space") == {"a": "1", "b": "2 = two"}
    await admin.delete_kv("admin-space", "a")
    assert await admin.list_kv("admin-space") == {"b": "2 = two"}


async def write_permission_is_taken_and_given_back(admin: Admin) -> None:
    _, broker, _ = await the_broker(admin)
    await admin.create_topic("admin-perm", 1)
    [(at, count)] = (await admin.wipe_write_perm(broker)).items()
    assert at == str(admin.session.names)
    assert count > 0
    assert (await admin.topic_route("admin-perm")).to_send == ()
    [(_, count)] = (await admin.add_write_perm(broker)).items()
    assert count > 0
    assert len((await admin.topic_route("admin-perm")).to_send) == 1


SCENARIOS: tuple[Scenario, ...] = (
    topics_live_and_die,
    attributes_of_topics_are_kept,
    ordered_topics_are_told_to_name_servers,
    names_that_do_not_exist_are_answered_with_those_that_do,
    topic_stats_tell_what_is_there,
    groups_live_and_die,
    members_and_their_progress_are_seen,
    messages_are_found,
    offsets_of_an_offline_group_are_moved,
    offsets_of_a_group_online_are_moved,
    dead_letters_are_read_and_sent_again,
    brokers_tell_of_themselves_and_are_changed,
    kv_entries_live_and_die,
    write_permission_is_taken_and_given_back,
)


async def play(scenario: Scenario, namesrv: str) -> None:
    async with Admin(namesrv, timeout_ms=10_000) as admin:
        await scenario(admin)
