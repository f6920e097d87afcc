"""Key-value settings and their file, the live configuration, and shutdown."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.errors import StoreCorrupt
from cometmq.ports import ConnId
from cometmq.wire import fastjson
from cometmq.wire.codes import FLAG_ONEWAY, RequestCode
from cometmq.wire.frame import Frame

PUT, GET, DELETE = 100, 101, 102


def item(key: str, value: str | None = None, namespace: str = "N") -> dict[str, str]:
    fields = {"namespace": namespace, "key": key}
    return fields if value is None else fields | {"value": value}


def test_a_setting_is_kept_in_rocketmq_s_shape(bench: Any) -> None:
    (save,) = bench.saves(bench.send(PUT, item("k", "v")))
    assert (save.name, save.content) == ("kvConfig.json", b'{"configTable":{"N":{"k":"v"}}}')


def test_a_setting_outlives_the_process(make_bench: Any, bench: Any) -> None:
    (save,) = bench.saves(bench.send(PUT, item("k", "v\u00e4lue")))
    assert make_bench(kv=save.content).ask(GET, item("k")).ext == {"value": "v\u00e4lue"}


def test_an_empty_or_missing_file_is_no_setting(make_bench: Any) -> None:
    for content in None, b"", b"{}":
        assert make_bench(kv=content).ask(GET, item("k")).code == 22


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"configTable":{"N":3}}', b"\xff"])
def test_an_unreadable_file_stops_the_start(make_bench: Any, content: bytes) -> None:
    with pytest.raises(StoreCorrupt, match=r"kvConfig\.json"):
        make_bench(kv=content)


def test_a_change_is_answered_when_it_is_on_disk(bench: Any) -> None:
    out = bench.send(PUT, item("k", "v"), conn=5)
    assert bench.replies(out) == []
    out = bench.saved()
    assert [effect.conn for effect in out] == [5]
    assert bench.replies(out)[0].code == 0


def test_one_save_at_a_time_and_later_changes_share_the_next(bench: Any) -> None:
    assert len(bench.saves(bench.send(PUT, item("k1", "v")))) == 1
    for key in "k2", "k3":
        assert bench.send(PUT, item(key, "v")) == []
    out = bench.saved()
    assert len(bench.replies(out)) == 1
    (save,) = bench.saves(out)
    assert fastjson.loads(save.content) == {
        "configTable": {"N": dict.fromkeys(("k1", "k2", "k3"), "v")}
    }
    out = bench.saved()
    assert len(bench.replies(out)) == 2
    assert bench.saves(out) == []
    assert bench.server.stats.saves == 2


def test_changes_of_one_batch_share_a_save(bench: Any) -> None:
    out: list[Any] = []
    for opaque in range(3):
        frame = Frame(PUT, opaque, ext=item(f"k{opaque}", "v"))
        bench.server.handle(ConnId(1), frame, 0, bench.now_ms, out)
    bench.server.settle(bench.now_ms, out)
    assert len(bench.saves(out)) == 1
    assert len(bench.replies(bench.saved())) == 3


def test_a_change_that_changes_nothing_waits_for_nothing(bench: Any) -> None:
    bench.put("N", "k", "v")
    assert bench.ask(PUT, item("k", "v")).code == 0
    assert bench.ask(DELETE, item("other")).code == 0


def test_an_equal_change_waits_for_the_disk_as_the_first_does(bench: Any) -> None:
    bench.send(PUT, item("k", "v"))
    assert bench.send(PUT, item("k", "v")) == []
    assert len(bench.replies(bench.saved())) == 2


def test_a_failed_save_is_told_and_tried_again(bench: Any) -> None:
    bench.tick()
    bench.send(PUT, item("k", "v"))
    out = bench.saved("disk full")
    (answer,) = bench.replies(out)
    assert (answer.code, "disk full" in answer.remark) == (1, True)
    assert bench.saves(out) == []
    assert bench.saves(bench.send(GET, item("k"))) == []  # not at once, not for ever
    (save,) = bench.saves(bench.tick(5_000))
    assert b'"k":"v"' in save.content
    bench.saved()
    assert bench.saves(bench.tick(5_000)) == []
    assert bench.server.stats.saves_failed == 1


def test_after_a_failed_save_an_equal_change_is_not_called_done(bench: Any) -> None:
    bench.send(PUT, item("k", "v"))
    bench.saved("disk full")
    out = bench.send(PUT, item("k", "v"))
    assert (len(bench.saves(out)), bench.replies(out)) == (1, [])


def test_get_list_and_delete(bench: Any) -> None:
    bench.put("N", "k1", "v1")
    bench.put("N", "k2", "")
    assert bench.ask(GET, item("k1")).ext == {"value": "v1"}
    listed = bench.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "N"})
    assert listed.body == b'{"table":{"k1":"v1","k2":""}}'
    (save,) = bench.saves(bench.send(DELETE, item("k1")))
    assert save.content == b'{"configTable":{"N":{"k2":""}}}'
    bench.saved()
    answer = bench.ask(GET, item("k1"))
    assert (answer.code, "k1" in answer.remark) == (22, True)


def test_a_missing_namespace_is_not_found_an_emptied_one_is_empty(bench: Any) -> None:
    listing = RequestCode.GET_KVLIST_BY_NAMESPACE
    assert bench.ask(listing, {"namespace": "N"}).code == 22
    bench.put("N", "k", "v")
    bench.send(DELETE, item("k"))
    assert bench.ask(listing, {"namespace": "N"}).body == b'{"table":{}}'


def test_the_limit_of_settings_names_itself(make_bench: Any) -> None:
    bench = make_bench(max_kv_entries=2)
    bench.put("N", "k1", "v")
    bench.put("N", "k2", "v")
    answer = bench.ask(PUT, item("k3", "v"))
    assert (answer.code, "maxKvEntries=2" in answer.remark) == (1, True)
    assert bench.ask(GET, item("k3")).code == 22
    assert bench.server.stats.over_max_kv_entries == 1
    bench.put("N", "k2", "replaced")
    bench.send(DELETE, item("k2"))
    bench.saved()
    bench.put("N", "k3", "v")


def test_settings_of_the_file_count_towards_the_limit(make_bench: Any) -> None:
    bench = make_bench(kv=b'{"configTable":{"A":{"k":"v"},"B":{}}}', max_kv_entries=2)
    assert bench.ask(PUT, item("k", "v", namespace="C")).code == 1


def test_emptied_namespaces_count_towards_the_limit(make_bench: Any) -> None:
    bench = make_bench(max_kv_entries=2)
    for namespace in "A", "B":
        bench.put(namespace, "k", "v")
        bench.send(DELETE, item("k", namespace=namespace))
        bench.saved()
    assert bench.ask(PUT, item("k", "v", namespace="C")).code == 1
    bench.put("A", "again", "v")


def test_a_huge_setting_is_refused(bench: Any) -> None:
    assert bench.ask(PUT, item("k", "v" * 2_000_000)).code == 29
    assert bench.ask(GET, item("k")).code == 22


def test_a_missing_field_is_named(bench: Any) -> None:
    answer = bench.ask(PUT, {"namespace": "N", "key": "k"})
    assert (answer.code, "'value'" in answer.remark) == (29, True)


def test_a_oneway_change_is_saved_and_not_answered(bench: Any) -> None:
    assert len(bench.saves(bench.send(PUT, item("k", "v"), flag=FLAG_ONEWAY))) == 1
    assert bench.saved() == []


# ---------------------------------------------------------------------------- live configuration


def settings(bench: Any) -> dict[str, str]:
    text = bench.ask(RequestCode.GET_NAMESRV_CONFIG).body.decode()
    return dict(line.split("=", 1) for line in text.splitlines())


def test_the_configuration_is_told_as_properties(make_bench: Any) -> None:
    told = settings(make_bench(scan_interval_ms=1234))
    assert told["scanNotActiveBrokerInterval"] == "1234"
    assert told["orderMessageEnable"] == "false"


def test_a_live_key_changes_at_once(bench: Any) -> None:
    bench.put("ORDER_TOPIC_CONFIG", "T1", "broker-a:4")
    bench.register(["T1", "T2"])
    assert "orderTopicConf" not in bench.route("T1")
    body = b"# a comment\norderMessageEnable = true\nenableAllTopicList=false\n"
    assert bench.ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=body).code == 0
    assert bench.route("T1")["orderTopicConf"] == "broker-a:4"
    assert bench.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).code == 1


@pytest.mark.parametrize(
    "line",
    [
        "kvConfigPath=/tmp/elsewhere",
        "configStorePath=/tmp/elsewhere",
        "configBlackList=",
        "rocketmqHome=/tmp",
        "listenPort=1",
        "maxTopics=1",
        "noSuchKey=1",
        "is_order_topic_enabled=true",
    ],
)
def test_other_keys_are_forbidden_and_nothing_changes(bench: Any, line: str) -> None:
    before = settings(bench)
    for body in f"orderMessageEnable=true\n{line}\n", f"{line}\norderMessageEnable=true\n":
        answer = bench.ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=body.encode())
        assert (answer.code, line.split("=")[0] in answer.remark) == (16, True)
        assert settings(bench) == before


def test_a_wrong_value_is_an_invalid_parameter_and_nothing_changes(bench: Any) -> None:
    before = settings(bench)
    body = b"enableTopicList=false\norderMessageEnable=maybe\n"
    assert bench.ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=body).code == 29
    assert settings(bench) == before


def test_an_empty_update_is_fine(bench: Any) -> None:
    assert bench.ask(RequestCode.UPDATE_NAMESRV_CONFIG).code == 0


# --------------------------------------------------------------------------------------- shutdown


def stop(bench: Any) -> list[Any]:
    out: list[Any] = []
    bench.server.stop(bench.now_ms, out)
    return out


def test_an_idle_server_stops_at_once(bench: Any) -> None:
    bench.register(["T1", "T2"])
    assert not bench.server.is_stopped
    assert stop(bench) == []
    assert bench.server.is_stopped
    bench.server.close(bench.now_ms)


def test_stop_waits_for_the_save_on_its_way_and_the_one_behind_it(bench: Any) -> None:
    bench.send(PUT, item("k1", "v"))
    bench.send(PUT, item("k2", "v"))
    assert stop(bench) == []
    assert not bench.server.is_stopped
    (save,) = bench.saves(bench.saved())
    assert b"k2" in save.content
    assert not bench.server.is_stopped
    assert len(bench.replies(bench.saved())) == 1
    assert bench.server.is_stopped


def test_stop_tries_a_failed_save_once_more_and_then_gives_up(bench: Any) -> None:
    bench.send(PUT, item("k", "v"))
    bench.saved("disk full")
    assert len(bench.saves(stop(bench))) == 1
    assert not bench.server.is_stopped
    assert bench.saved("disk full") == []
    assert bench.server.is_stopped
    assert bench.tick(60_000) == []
    assert bench.server.is_stopped


def test_a_stopping_server_takes_no_requests(bench: Any) -> None:
    stop(bench)
    assert bench.ask(PUT, item("k", "v")).code == 14
    assert bench.server.is_stopped
