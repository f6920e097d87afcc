"""mqadmin, the official admin tool: every command prints what is true of the seeded data.

The commands run once per (server, client) pair, side by side where they do not depend on each
other; each test then reads the output of one of them.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from .driver import Driver, fail_on_stack_trace
from .servers import BROKER_NAME, CLUSTER

pytestmark = pytest.mark.interop

Output = Callable[[str], str]

SENT = 10
NEW_TOPIC = "AdminTopic"
# A stage starts when the one before it has ended; its commands run side by side.
STAGES: tuple[dict[str, str], ...] = (
    {
        "updateTopic": f"updateTopic -c {CLUSTER} -t {NEW_TOPIC} -r 5 -w 5",
        "updateSubGroup": "updateSubGroup -b {broker} -g AdminGroup -r 3",
        "topicRoute": "topicRoute -t {topic}",
        "topicStatus": "topicStatus -t {topic}",
        "clusterList": "clusterList",
        "brokerStatus": "brokerStatus -b {broker}",
        "queryMsgByKey": "queryMsgByKey -t {topic} -k {key}",
        "consumerProgress": "consumerProgress -g {group}",
        "queryMsgById": "queryMsgById {by_id_topic} -i {offset_id}",
    },
    {
        "topicList": "topicList",
        "newTopicRoute": f"topicRoute -t {NEW_TOPIC}",
        # Not beside queryMsgById: both write the body to the same file.
        "queryMsgByUniqueKey": "queryMsgByUniqueKey -t {topic} -i {unique_id}",
    },
    {"deleteTopic": f"deleteTopic -c {CLUSTER} -t {NEW_TOPIC}"},
    {"topicListAfterDelete": "topicList"},
)


@pytest.fixture(scope="session")
def seed(driver: Driver) -> dict[str, Any]:
    return driver.scenario("seed")


@pytest.fixture(scope="session")
def outputs(driver: Driver, seed: dict[str, Any]) -> dict[str, str]:
    # Release 5 finds a message by id within a topic; release 4 does not know the option.
    by_id_topic = "" if driver.client == "client-4" else f"-t {seed['topic']}"
    facts = {**seed, "broker": driver.server.broker, "by_id_topic": by_id_topic}
    printed: dict[str, str] = {}
    for stage in STAGES:
        commands = [command.format(**facts) for command in stage.values()]
        for name, output in zip(stage, driver.mqadmin(*commands), strict=True):
            printed[name] = output + take_body_file(output)
    return printed


@pytest.fixture
def output(outputs: dict[str, str]) -> Output:
    def of(name: str) -> str:
        fail_on_stack_trace(outputs[name])
        return outputs[name]

    return of


def take_body_file(printed: str) -> str:
    """The body that mqadmin wrote to a file of fixed place; removed, so that nothing stays."""
    found = re.search(r"^Message Body Path: +(\S+)", printed, re.MULTILINE)
    if found is None:
        return ""
    file = Path(found[1])
    body = file.read_text()
    file.unlink()
    with suppress(OSError):
        file.parent.rmdir()
        file.parent.parent.rmdir()
    return f"\nBody: {body}\n"


def rows(printed: str, first_word: str) -> list[list[str]]:
    """The table rows that start with a given word, as words."""
    lines = [line.split() for line in printed.splitlines()]
    return [words for words in lines if words and words[0] == first_word]


def fields(printed: str) -> dict[str, str]:
    """Lines of the form `name: value`."""
    pairs = (line.partition(":") for line in printed.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def test_update_topic(driver: Driver, output: Output) -> None:
    assert f"create topic to {driver.server.broker} success." in output("updateTopic")
    route = output("newTopicRoute")
    assert '"readQueueNums":5' in route
    assert '"writeQueueNums":5' in route


def test_topic_list(seed: dict[str, Any], output: Output) -> None:
    listed = output("topicList").split()
    assert {seed["topic"], NEW_TOPIC, "TBW102", "%RETRY%" + seed["group"]} <= set(listed)


def test_topic_route(driver: Driver, output: Output) -> None:
    route = re.sub(r"\s", "", output("topicRoute"))
    assert f'"brokerAddrs":{{0:"{driver.server.broker}"}}' in route
    assert f'"cluster":"{CLUSTER}"' in route
    assert '"perm":6,"readQueueNums":4' in route


def test_topic_status(output: Output) -> None:
    queues = rows(output("topicStatus"), BROKER_NAME)
    assert [row[1] for row in queues] == ["0", "1", "2", "3"]
    assert {row[2] for row in queues} == {"0"}
    assert sum(int(row[3]) for row in queues) == SENT


def test_cluster_list(driver: Driver, output: Output) -> None:
    (broker,) = rows(output("clusterList"), CLUSTER)
    assert broker[1:4] == [BROKER_NAME, "0", driver.server.broker]


def test_broker_status(output: Output) -> None:
    status = fields(output("brokerStatus"))
    assert status["commitLogMinOffset"] == "0"
    assert int(status["commitLogMaxOffset"]) > 0
    assert int(status["msgPutTotalTodayNow"]) >= SENT
    assert int(status["msgGetTotalTodayNow"]) >= SENT
    assert int(status["bootTimestamp"]) > 0
    assert status["brokerVersionDesc"]


def test_query_message_by_id(seed: dict[str, Any], output: Output) -> None:
    shown = fields(output("queryMsgById"))
    assert shown["OffsetID"] == seed["offset_id"]
    assert shown["Topic"] == seed["topic"]
    assert shown["Tags"] == f"[{seed['tag']}]"
    assert shown["Keys"] == f"[{seed['key']}]"
    assert shown["Queue ID"] == str(seed["queue"])
    assert shown["Body"] == seed["body"]


def test_query_message_by_key(seed: dict[str, Any], output: Output) -> None:
    (found,) = rows(output("queryMsgByKey"), seed["unique_id"])
    assert found[1] == str(seed["queue"])


def test_query_message_by_unique_key(seed: dict[str, Any], output: Output) -> None:
    shown = fields(output("queryMsgByUniqueKey"))
    assert shown["Topic"] == seed["topic"]
    assert shown["Keys"] == f"[{seed['key']}]"
    assert shown["Body"] == seed["body"]


def test_consumer_progress(seed: dict[str, Any], output: Output) -> None:
    queues = rows(output("consumerProgress"), seed["topic"])
    assert sorted(row[2] for row in queues) == ["0", "1", "2", "3"]
    assert sum(int(row[3]) for row in queues) == SENT
    assert [row[4] for row in queues] == [row[3] for row in queues]


def test_update_subscription_group(driver: Driver, output: Output) -> None:
    printed = output("updateSubGroup")
    assert f"create subscription group to {driver.server.broker} success." in printed
    assert "retryMaxTimes=3" in printed


def test_delete_topic(output: Output) -> None:
    printed = output("deleteTopic")
    assert f"delete topic [{NEW_TOPIC}] from cluster [{CLUSTER}] success." in printed
    assert f"delete topic [{NEW_TOPIC}] from NameServer success." in printed
    assert NEW_TOPIC not in output("topicListAfterDelete").split()
