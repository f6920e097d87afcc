"""Starting, stopping and configuring the real programs."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from cometmq import _fast
from cometmq.client.remote import Remote
from cometmq.wire import bodies, record
from cometmq.wire.codes import RequestCode, ResponseCode
from cometmq.wire.frame import ROCKETMQ
from programs import SMALL, Program, pull_ext, read_queue, send, write_conf

Up = Callable[..., Program]
Start = Callable[..., Program]


def test_up_says_where_it_is_and_serves(up: Up, tmp_path: Path) -> None:
    program = up()
    assert program.places.keys() == {"namesrv", "broker", "store", "path"}
    assert program.places["store"] == str(tmp_path / "store")
    with Remote(program.broker) as remote:
        answer = send(remote, "orders", b"hello", tag="paid")
        assert answer.code == 0
        assert answer.ext["queueOffset"] == "0"
    with Remote(program.namesrv) as remote:
        route = remote.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"})
        assert b'"writeQueueNums":4' in route.body
    assert [m.body for m in read_queue(program.broker, "orders", 0)] == [b"hello"]


def test_it_says_which_path_it_runs_and_both_serve(up: Up) -> None:
    expected = "plain" if _fast.load()[0] is None else "compiled"
    for conf, path in (({}, expected), ({"compiledPathEnable": "false"}, "plain")):
        program = up(conf)
        assert program.places["path"] == path
        with Remote(program.broker) as remote:
            for _ in range(20):
                assert send(remote, "orders", b"hello", unique="U1").code == 0
            figures = remote.call(RequestCode.GET_BROKER_RUNTIME_INFO, {}).body
        compiled = int(json.loads(figures)["table"]["cometmqRequestsCompiled"])
        assert compiled > 10 if path == "compiled" else compiled == 0
        program.stop()


def test_binary_headers_are_answered_in_binary(up: Up) -> None:
    program = up()
    with Remote(program.broker, serialize=ROCKETMQ) as remote:
        answer = send(remote, "orders", b"hello")
        assert (answer.code, answer.serialize) == (0, ROCKETMQ)
    assert len(read_queue(program.broker, "orders", 0, ROCKETMQ)) == 1


def test_sigterm_answers_what_waits_and_leaves_a_clean_store(up: Up, tmp_path: Path) -> None:
    program = up()
    store = tmp_path / "store"
    with Remote(program.broker) as remote:
        send(remote, "orders", b"hello")
        assert (store / "abort").exists()
        held = remote.send(RequestCode.PULL_MESSAGE, pull_ext("orders", 0, 1, suspend_ms=15_000))
        time.sleep(0.2)
        began = time.monotonic()
        program.process.terminate()
        assert remote.wait(held, 5_000).code == ResponseCode.PULL_NOT_FOUND
        assert program.process.wait(5) == 0
        assert time.monotonic() - began < 5
    assert not (store / "abort").exists()


def test_sigint_is_as_good_as_sigterm(up: Up) -> None:
    program = up()
    program.process.send_signal(2)
    assert program.process.wait(5) == 0


def test_offsets_topics_and_groups_survive_a_restart(up: Up) -> None:
    program = up()
    with Remote(program.broker) as remote:
        send(remote, "orders", b"a")
        where = {"topic": "orders", "queueId": "0", "consumerGroup": "billing"}
        remote.call(
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=b'{"groupName":"billing"}'
        )
        remote.call(RequestCode.UPDATE_CONSUMER_OFFSET, where | {"commitOffset": "1"})
    assert program.stop() == 0
    program = up()
    with Remote(program.broker) as remote:
        assert remote.call(RequestCode.QUERY_CONSUMER_OFFSET, where).ext["offset"] == "1"
        assert send(remote, "orders", b"b").ext["queueOffset"] == "1"


def test_kill_9_loses_nothing_that_was_flushed_and_repeats_no_offset(up: Up) -> None:
    program = up(SMALL | {"flushDiskType": "SYNC_FLUSH"})
    sent = []
    with Remote(program.broker) as remote:
        for number in range(3_000):
            body = b"%05d" % number + b"x" * (number % 700)
            answer = send(remote, "orders", body, queue_id=number % 4, keys=f"k{number}")
            assert answer.code == 0
            sent.append((number % 4, int(answer.ext["queueOffset"]), body))
    program.kill()
    program = up(SMALL | {"flushDiskType": "SYNC_FLUSH"})
    for queue_id in range(4):
        found = [
            (m.queue_id, m.queue_offset, m.body)
            for m in read_queue(program.broker, "orders", queue_id)
        ]
        assert found == [one for one in sent if one[0] == queue_id]
    with Remote(program.broker) as remote:
        assert send(remote, "orders", b"next", queue_id=1).ext["queueOffset"] == "750"
        for number in (0, 1499, 2999):
            answer = remote.call(
                RequestCode.QUERY_MESSAGE,
                {"topic": "orders", "key": f"k{number}", "maxNum": "8"}
                | {"beginTimestamp": "0", "endTimestamp": str(2**62)},
            )
            assert record.decode(answer.body).body == sent[number][2]


def test_a_second_process_on_the_same_store_is_refused(up: Up, start: Start) -> None:
    program = up()
    second = start(
        "up", "--namesrv-port", "0", "--broker-port", "0", "--store", program.places["store"]
    )
    assert second.process.wait(10) == 1
    assert program.places["store"] in second.error_text()
    assert "Traceback" not in second.error_text()


def test_a_taken_port_is_one_clear_line(up: Up, start: Start, tmp_path: Path) -> None:
    program = up()
    port = program.broker.rpartition(":")[2]
    second = start(
        *("up", "--namesrv-port", "0", "--broker-port", port, "--store", str(tmp_path / "other"))
    )
    assert second.process.wait(10) == 1
    assert f"can't listen on 127.0.0.1:{port}" in second.error_text()
    assert "Traceback" not in second.error_text()


def test_an_unknown_key_suggests_the_nearest(start: Start, tmp_path: Path) -> None:
    conf = write_conf(tmp_path / "broker.conf", {"flushDiskTipe": "SYNC_FLUSH"})
    program = start("up", "--broker-conf", conf, "--store", str(tmp_path / "store"))
    assert program.process.wait(10) == 1
    assert "unknown key 'flushDiskTipe'; did you mean 'flushDiskType'?" in program.error_text()
    assert not (tmp_path / "store").exists()


def test_rocketmq_keys_without_effect_are_accepted_and_said(up: Up) -> None:
    program = up({"sendMessageThreadPoolNums": "4", "brokerName": "b1"})
    assert "without effect here: sendMessageThreadPoolNums" in program.error_text()


def test_the_vip_port_works(up: Up) -> None:
    program = up()
    host, _, port = program.broker.rpartition(":")
    with Remote(f"{host}:{int(port) - 2}") as remote:
        assert send(remote, "orders", b"by vip").code == 0


def test_an_advertised_address_out_of_reach_is_a_warning(up: Up) -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))  # bound, not listening, and not the broker's port
    program = up({"brokerIP1": "127.255.255.254"})
    line = program.wait_for_error("can't be reached from this host")
    assert "brokerIP1" in line
    taken.close()


def test_listening_beyond_loopback_is_a_warning(up: Up) -> None:
    program = up({"brokerIP1": "127.0.0.1"}, "--host", "0.0.0.0")
    assert "without access control" in program.error_text()


def test_separate_programs_and_a_name_server_that_comes_back(start: Start, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    namesrv = start("namesrv", "--port", "0", env=home).ready()
    address = namesrv.namesrv
    broker = start(
        *("broker", "-n", address, "--port", "0", "--store", str(tmp_path / "store")), env=home
    ).ready()
    with Remote(broker.broker) as remote:
        assert send(remote, "orders", b"x").code == 0
    namesrv.kill()
    with Remote(broker.broker) as remote:
        assert send(remote, "fresh", b"x").code == 0, "a dead name server must not block sends"
    port = address.rpartition(":")[2]
    namesrv = start("namesrv", "--port", port, env=home).ready()
    _await_route(address, "fresh")
    assert broker.stop() == 0
    with Remote(address) as remote:
        answer = remote.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "fresh"})
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST


def _await_route(namesrv: str, topic: str) -> None:
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        with Remote(namesrv) as remote:
            if remote.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}).code == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"no route for {topic}")


def test_a_new_topic_is_known_to_every_name_server_before_its_send_is_answered(
    start: Start, tmp_path: Path
) -> None:
    home = {"HOME": str(tmp_path)}
    both = [start("namesrv", "--port", "0", env=home).ready().namesrv for _ in range(2)]
    broker = start(
        *("broker", "-n", ";".join(both), "--port", "0", "--store", str(tmp_path / "s")), env=home
    ).ready()
    with Remote(broker.broker) as remote:
        for number in range(20):
            assert send(remote, f"new-{number}", b"x").code == 0
            for address in both:
                with Remote(address) as name_server:
                    where = {"topic": f"new-{number}"}
                    assert name_server.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, where).code == 0


def test_a_killed_broker_leaves_the_routes_at_once(start: Start, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    namesrv = start("namesrv", "--port", "0", env=home).ready()
    broker = start(
        *("broker", "-n", namesrv.namesrv, "--port", "0", "--store", str(tmp_path / "s")), env=home
    ).ready()
    with Remote(namesrv.namesrv) as remote:
        assert remote.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"}).code == 0
        broker.kill()
        time.sleep(0.3)
        answer = remote.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"})
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST


def test_a_new_broker_copies_topics_and_groups(start: Start, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    namesrv = start("namesrv", "--port", "0", env=home).ready().namesrv
    old_conf = write_conf(tmp_path / "a.conf", {"brokerName": "broker-a"})
    old = start(
        *("broker", "-n", namesrv, "-c", old_conf, "--port", "0", "--store", str(tmp_path / "a")),
        env=home,
    ).ready()
    with Remote(old.broker) as remote:
        for number in range(50):
            remote.call(
                RequestCode.UPDATE_AND_CREATE_TOPIC,
                {"topic": f"t{number}", "defaultTopic": "TBW102", "perm": "6", "order": "false"}
                | {"readQueueNums": "3", "writeQueueNums": "3", "topicFilterType": "SINGLE_TAG"},
            )
        group = b'{"groupName":"billing","retryMaxTimes":3}'
        remote.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group)
    new_conf = write_conf(tmp_path / "b.conf", {"brokerName": "broker-b"})
    new = start(
        *("broker", "-n", namesrv, "-c", new_conf, "--port", "0", "--store", str(tmp_path / "b")),
        "--copy-topics",
        env=home,
    ).ready()
    with Remote(new.broker) as remote:
        raw = remote.call(RequestCode.GET_ALL_TOPIC_CONFIG).body
        topics = bodies.load_object(raw, "topics")["topicConfigTable"]
        assert all(topics[f"t{number}"]["readQueueNums"] == 3 for number in range(50))
        assert "broker-a" not in topics
        assert "rmq_sys_SYNC_BROKER_MEMBER_broker-a" not in topics
        raw = remote.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
        groups = bodies.load_object(raw, "groups")["subscriptionGroupTable"]
        assert groups["billing"]["retryMaxTimes"] == 3
    with Remote(namesrv) as remote:
        route = remote.call(
            RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t7", "acceptStandardJsonOnly": "true"}
        )
        names = {one["brokerName"] for one in bodies.load_object(route.body, "route")["queueDatas"]}
        assert names == {"broker-a", "broker-b"}


def test_copy_topics_without_a_cluster_says_so(start: Start, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    namesrv = start("namesrv", "--port", "0", env=home).ready().namesrv
    broker = start(
        *("broker", "-n", namesrv, "--port", "0", "--store", str(tmp_path / "s"), "--copy-topics"),
        env=home,
    )
    assert broker.process.wait(10) == 1
    assert "knows no other broker of cluster 'DefaultCluster'" in broker.error_text()


def test_refused_updates_change_nothing_on_disk_or_in_memory(up: Up, tmp_path: Path) -> None:
    program = up()
    with Remote(program.broker) as remote:
        assert send(remote, "orders", b"first").code == 0
    time.sleep(1)  # let the first saves of topics and groups come to rest
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with Remote(program.broker) as remote:
        config = remote.call(RequestCode.GET_BROKER_CONFIG).body
        for text in (
            b"storePathRootDir=/tmp/evil\n",
            b"rocketmqHome=/tmp/evil;id\n",
            b"filterServerNums=1\nrocketmqHome=-c $@|sh . echo id;\n",
            b"brokerPermission=4\nlistenPort=1\n",
            b"configStorePath=/etc/passwd\n",
            b"brokerPermission=999\n",
        ):
            answer = remote.ask(RequestCode.UPDATE_BROKER_CONFIG, body=text)
            assert answer.code == ResponseCode.NO_PERMISSION, text
            assert remote.call(RequestCode.GET_BROKER_CONFIG).body == config
        for topic in ("../../x", "a/b", "..", "a\0b", "/etc/passwd", "x" * 300, ""):
            assert send(remote, topic, b"x").code == ResponseCode.INVALID_PARAMETER, topic
    with Remote(program.namesrv) as remote:
        config = remote.call(RequestCode.GET_NAMESRV_CONFIG).body
        for text in (b"kvConfigPath=/etc/x\n", b"configStorePath=/etc/x\n", b"nonsense=1\n"):
            answer = remote.ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=text)
            assert answer.code == ResponseCode.NO_PERMISSION, text
            assert remote.call(RequestCode.GET_NAMESRV_CONFIG).body == config
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert not os.path.exists("/tmp/evil")
