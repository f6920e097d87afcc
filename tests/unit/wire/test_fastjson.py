"""JSON as fastjson, C++, Go and Node write it, and as they want to read it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from cometmq.errors import BodyError
from cometmq.wire import fastjson
from cometmq.wire.fastjson import ObjectKey, dumps, loads

QUEUE = ObjectKey(brokerName="b", queueId=0, topic="t")


# ---------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'{"a":[1,2.5,"x",true,false,null]}', {"a": [1, 2.5, "x", True, False, None]}),
        (b'{0:"10.0.0.1:10911",1:"x"}', {"0": "10.0.0.1:10911", "1": "x"}),
        (b"{-1:2,abc_$.d:3}", {"-1": 2, "abc_$.d": 3}),
        (b"{'a':'it\\'s \"q\"'}", {"a": 'it\'s "q"'}),
        (b'{"a":1,}', {"a": 1}),
        (b"[1,2,]", [1, 2]),
        (b"[,1,,2]", [1, 2]),
        (b'{,"a":1,,}', {"a": 1}),
        (b' \t{ "a" : [ 1 , { } ] , } \n', {"a": [1, {}]}),
        (b"[1L,2d,3.5F,-4l,]", [1, 2, 3.5, -4]),
        (b"[1.25E10,-0.5e-3,]", [1.25e10, -0.0005]),
        (b'["12",]', ["12"]),
        (b'["\\u4e2d\\n\\/\\v\\0",]', ["中\n/\v\0"]),
        ('["中文 raw",]'.encode(), ["中文 raw"]),
        (b'["\n\x01raw control",]', ["\n\x01raw control"]),
        (b'["\\ud83d\\ude00",]', ["😀"]),
        (b'["\\ud83d",]', ["?"]),
        (b'["\\ude00\\ud83dx"]', ["??x"]),
        ('["\ufffd\\ud83d\\ude00"]'.encode(), ["\ufffd😀"]),
        (b'{"a":1,"a":2}', {"a": 2}),
        (b'{"a":1,"a":2,}', {"a": 2}),
        (b'"x"', "x"),
        (b"18446744073709551616", 18446744073709551616),
    ],
)
def test_reads(raw: bytes, value: Any) -> None:
    assert loads(raw) == value
    assert loads(bytearray(raw)) == value
    assert loads(memoryview(raw)) == value


def test_reads_objects_as_keys() -> None:
    raw = b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t"}:5,{"topic":"u",}:[6]}}'
    assert loads(raw) == {"offsetTable": {QUEUE: 5, ObjectKey(topic="u"): [6]}}
    assert type(next(iter(loads(raw)["offsetTable"]))) is ObjectKey


def test_object_keys_are_found_in_any_order_of_their_fields() -> None:
    table = {QUEUE: 5}
    assert table[ObjectKey(topic="t", queueId=0, brokerName="b")] == 5
    assert ObjectKey(topic="t", queueId=1, brokerName="b") not in table


def test_object_keys_may_be_strange() -> None:
    key = next(iter(loads(b'{{{"a":1}:2,"b":[3]}:4}')))
    assert key == {ObjectKey(a=1): 2, "b": [3]}
    assert isinstance(hash(key), int)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'{"a":{"x":1},"b":{"$ref":"$.a"}}', {"a": {"x": 1}, "b": {"x": 1}}),
        (b'{"a":{"x":1},"b":{"$ref":"$.a"},}', {"a": {"x": 1}, "b": {"x": 1}}),
        (b"{a:{x:1},b:{'$ref':'$.a'}}", {"a": {"x": 1}, "b": {"x": 1}}),
        (b'{"l":[[7],{"$ref":"$.l[0]"}]}', {"l": [[7], [7]]}),
        (b'[{"a":[{"q":1}]},{"$ref":"$[0].a[0]"}]', [{"a": [{"q": 1}]}, {"q": 1}]),
        (b'{"m":{0:{"x":1}},"n":{"$ref":"$.m[0]"}}', {"m": {"0": {"x": 1}}, "n": {"x": 1}}),
        (
            b'{"m":{"broker-a.x":{"x":1}},"n":{"$ref":"$.m.broker\\\\-a\\\\.x"}}',
            {"m": {"broker-a.x": {"x": 1}}, "n": {"x": 1}},
        ),
        # a target that itself has references
        (
            b'{"a":{"x":1},"b":[{"$ref":"$.a"}],"c":{"$ref":"$.b"}}',
            {"a": {"x": 1}, "b": [{"x": 1}], "c": [{"x": 1}]},
        ),
        (b'{"a":{"$ref":"$.b"},"b":{"$ref":"$.c"},"c":[1]}', {"a": [1], "b": [1], "c": [1]}),
        (b'{"t":{"q":1},"m":{{"$ref":"$.t"}:5}}', {"t": {"q": 1}, "m": {ObjectKey(q=1): 5}}),
    ],
)
def test_references_are_resolved(raw: bytes, value: Any) -> None:
    assert loads(raw) == value


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":{"$ref":"$.nowhere"}}',
        b'{"a":{"$ref":"$.x.y.z"},"x":5}',
        b'{"a":{"$ref":"$[9]"}}',
        b'{"a":{"$ref":"$.x"},"x":5}',
        b'{"a":{"$ref":"@"}}',
        b'{"a":{"$ref":".."}}',
        b'{"a":{"$ref":"$"}}',
        b'{"a":[{"$ref":"$.a"}]}',
        b'{"a":{"$ref":5}}',
        b'{"a":{"$ref":"$..a"}}',
        b'{"a":{"$ref":"$.b","more":1},"b":[]}',
        b'{"a":"$ref"}',
        b'{"$ref":"$"}',
    ],
)
def test_what_is_no_reference_to_anything_stays(raw: bytes) -> None:
    assert loads(raw) == json.loads(raw)


def test_references_to_each_other_end() -> None:
    found = loads(b'{"a":{"$ref":"$.b"},"b":{"$ref":"$.a"}}')
    assert set(found) == {"a", "b"}
    dumps(found)


def test_references_can_not_grow_without_bound() -> None:
    twice = '"a{}":[{{"$ref":"$.a{}"}},{{"$ref":"$.a{}"}}]'
    levels = ",".join(twice.format(n, n + 1, n + 1) for n in range(25))
    with pytest.raises(BodyError, match="expand to more than"):
        loads(f'{{{levels},"a25":[1]}}'.encode())


def test_a_long_chain_of_references_is_refused() -> None:
    chain = ",".join(f'"a{n}":{{"$ref":"$.a{n + 1}"}}' for n in range(5000))
    with pytest.raises(BodyError, match="deeper"):
        loads(f'{{{chain},"a5000":[1]}}'.encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"{",
        b"[",
        b"[1",
        b'{"a"',
        b'{"a":',
        b'{"a":1',
        b'{"a" 1}',
        b"{:1}",
        b"{a b:1}",
        b"[1 2]",
        b'"',
        b"'",
        b'"a',
        b'"\\',
        b'["\\u12g4"]',
        b'["\\u12',
        b"nul",
        b"NaN",
        b"[Infinity]",
        b"[-]",
        b"[.5]",
        b"[1.]",
        "[\u0661]".encode(),
        b"1e999999",
        b"-1e400",
        b"1" * 10_000,
        b"[" + b"1" * 10_000 + b",]",
        b"{} {}",
        b"{}\0",
        b"\xff",
        b'["\xed\xa0\x80"]',
        b"undefined",
        b"]",
    ],
)
def test_what_can_not_be_read(raw: bytes) -> None:
    with pytest.raises(BodyError):
        loads(raw)


def nested(depth: int, tail: str = "") -> bytes:
    return ("[" * depth + tail + "]" * depth).encode()


@pytest.mark.parametrize("tail", ["", "1,"])
def test_depth_has_one_limit_for_both_readers(tail: str) -> None:
    loads(nested(fastjson.MAX_DEPTH, tail))
    for depth in (fastjson.MAX_DEPTH + 2, 900, 100_000):
        with pytest.raises(BodyError, match="deeper"):
            loads(nested(depth, tail))
    with pytest.raises(BodyError, match="deeper"):
        loads(b'{"a":' * 100_000)
    with pytest.raises(BodyError, match="deeper"):
        loads(b"{" * 100_000)


def test_many_brackets_side_by_side_are_not_deep() -> None:
    raw = b"[" + b",".join([b'{"a":[]}'] * 500) + b"]"
    assert len(loads(raw)) == 500


@pytest.mark.parametrize(
    "raw",
    [
        b"[" + b'"a",' * 20_000 + b'"' + b"x" * 8_000_000 + b'",]',
        b'["' + b"\\n" * 20_000 + b"x" * 8_000_000 + b'",]',
        b"['" + b"x" * 1_000_000 + b"'" + b"," * 100_000 + b"]",
    ],
    ids=["strings", "escapes", "commas"],
)
def test_time_grows_with_the_bytes_only(raw: bytes) -> None:
    begin = time.process_time()
    loads(raw)
    assert time.process_time() - begin < 2, "each small string must not look at all of the rest"


# ---------------------------------------------------------------------------------------- writing


def test_writes_without_blanks() -> None:
    assert dumps({"a": [1, 2.5, "x y", True, None], "b": {}, "c": [], "d": (1,)}) == (
        b'{"a":[1,2.5,"x y",true,null],"b":{},"c":[],"d":[1]}'
    )


def test_integer_keys_are_quoted_unless_the_asker_is_old() -> None:
    value = {"brokerAddrs": {0: "10.0.0.1:10911", 1: "x"}}
    assert dumps(value) == b'{"brokerAddrs":{"0":"10.0.0.1:10911","1":"x"}}'
    assert dumps(value, bare_int_keys=True) == b'{"brokerAddrs":{0:"10.0.0.1:10911",1:"x"}}'
    assert loads(dumps(value, bare_int_keys=True)) == loads(dumps(value))


def test_object_keys_are_bare_in_both_modes() -> None:
    raw = b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t"}:5}}'
    assert dumps({"offsetTable": {QUEUE: 5}}) == raw
    assert dumps({"offsetTable": {QUEUE: 5}}, bare_int_keys=True) == raw
    assert loads(raw) == {"offsetTable": {QUEUE: 5}}


def test_text_is_utf8_and_escaped() -> None:
    assert dumps({"ä\n": '中"\\/\x01'}) == '{"ä\\n":"中\\"\\\\/\\u0001"}'.encode()


def test_numbers_that_json_does_not_know_become_null() -> None:
    assert dumps([float("nan"), float("inf")]) == b"[null,null]"


def test_large_integers() -> None:
    assert dumps([2**63, -(2**70)]) == b"[9223372036854775808,-1180591620717411303424]"


def test_standard_mode_is_ascii_with_escaped_slashes() -> None:
    raw = dumps({"中": "a/b😀", 1: {2: []}}, standard=True, bare_int_keys=True)
    assert raw == b'{"\\u4e2d":"a\\/b\\ud83d\\ude00","1":{"2":[]}}'
    assert json.loads(raw) == {"中": "a/b😀", "1": {"2": []}}


def test_standard_mode_quotes_what_a_double_can_not_hold() -> None:
    limit = 2**53 - 1
    assert dumps([limit, -limit, limit + 1, -limit - 1, True, 0.5], standard=True) == (
        b'[9007199254740991,-9007199254740991,"9007199254740992","-9007199254740992",true,0.5]'
    )


def test_standard_mode_makes_object_keys_strings() -> None:
    raw = dumps({QUEUE: 5}, standard=True)
    ((key, value),) = json.loads(raw).items()
    assert (json.loads(key), value) == (dict(QUEUE), 5)


def test_the_route_body_of_an_old_name_server() -> None:
    route = {
        "brokerDatas": [
            {
                "brokerAddrs": {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"},
                "brokerName": "broker-a",
                "cluster": "DefaultCluster",
                "enableActingMaster": False,
            }
        ],
        "filterServerTable": {},
        "queueDatas": [
            {
                "brokerName": "broker-a",
                "perm": 6,
                "readQueueNums": 4,
                "topicSysFlag": 0,
                "writeQueueNums": 4,
            }
        ],
    }
    assert dumps(route, bare_int_keys=True) == (
        b'{"brokerDatas":[{"brokerAddrs":{0:"10.0.0.1:10911",1:"10.0.0.2:10911"},"brokerName":'
        b'"broker-a","cluster":"DefaultCluster","enableActingMaster":false}],"filterServerTable":{}'
        b',"queueDatas":[{"brokerName":"broker-a","perm":6,"readQueueNums":4,"topicSysFlag":0,'
        b'"writeQueueNums":4}]}'
    )
