"""The Admin's pure parts: ids, permissions, attributes, and what is said of several failures."""

from __future__ import annotations

import pytest

from cometmq.client.admin_asking import PartlyDone, UnknownName, listed, raise_failed
from cometmq.client.admin_cluster import properties_text
from cometmq.client.admin_members import Client
from cometmq.client.admin_messages import IdParts, read_id
from cometmq.client.admin_topics import attribute_changes, perm_bits, perm_text
from cometmq.errors import CometError, RequestRefused, RequestTimeout, UsageError


def test_the_two_kinds_of_id_are_told_apart() -> None:
    assert read_id("0A00000100002A9F0000000000001000") == IdParts("offset", "10.0.0.1:10911", 4096)
    v6 = "20010DB8" + "0" * 23 + "1" + "00002A9F" + "0000000000001000"
    assert read_id(v6) == IdParts("offset", "[2001:db8::1]:10911", 4096)
    assert read_id("7F000001ABCD18B4AAC26A3F5B7E0001") == IdParts("unique")
    assert read_id("order-4711") == IdParts("unique")
    assert read_id("0A00000100002A9FFFFFFFFFFFFFFFFF").kind == "unique"  # no negative offsets


def test_permissions_are_letters() -> None:
    assert [perm_bits(text) for text in ("rw", "RW-", "r", "w", "-", "")] == [6, 6, 4, 2, 0, 0]
    assert [perm_text(bits) for bits in (7, 6, 4, 2, 0)] == ["rw", "rw", "r", "w", ""]
    assert perm_bits(5) == 5
    with pytest.raises(UsageError, match="rx"):
        perm_bits("rx")


def test_attributes_are_sent_as_changes() -> None:
    assert attribute_changes(None) is None
    assert attribute_changes({"message.type": "FIFO", "old": None}) == "+message.type=FIFO,-old"
    for bad in ({"a,b": "c"}, {"a": "b,c"}, {"": "x"}):
        with pytest.raises(UsageError, match="can't be written"):
            attribute_changes(bad)


def test_settings_that_would_read_differently_are_refused() -> None:
    assert properties_text({"a": "1", "b": "x=y"}) == b"a=1\nb=x=y\n"
    for bad in ({}, {"a": "1\nb=2"}, {"a b": "1"}, {"a": "c:\\x"}, {"#a": "1"}):
        with pytest.raises(UsageError):
            properties_text(bad)


@pytest.mark.parametrize(
    ("version", "name"),
    [(409, "4.9.8"), (413, "5.0.0"), (412, "5.0.0-SNAPSHOT"), (479, "5.3.3"), (317, "4.5.2")],
)
def test_versions_have_names(version: int, name: str) -> None:
    assert Client("c", "a", "JAVA", version, ()).version_name == name


def test_unknown_names_are_answered_with_the_known() -> None:
    error = UnknownName("cluster", "x", ["b", "a"])
    assert str(error) == "cluster 'x' is unknown: known clusters: a, b"
    assert error.known == ("b", "a")
    many = [f"topic-{number}" for number in range(50)]
    assert "50, like it" in listed("topics", "topic-7x", many)
    assert listed("topics", "zzz", many) == "topics: 50, none is like it"


def test_several_failures_become_one_error() -> None:
    late = RequestTimeout("late")
    with pytest.raises(RequestTimeout):
        raise_failed("work", {}, {"a": late})
    refused: dict[str, CometError] = {
        "a": RequestRefused(16, "no"),
        "b": RequestRefused(16, "nor I"),
    }
    with pytest.raises(RequestRefused, match="a: no; b: nor I") as same:
        raise_failed("work", {}, refused)
    assert same.value.code == 16
    with pytest.raises(PartlyDone, match=r"work failed on 1 of 2: b: late \(done on a\)") as partly:
        raise_failed("work", {"a": 1}, {"b": late})
    assert (partly.value.done, partly.value.failed) == ({"a": 1}, {"b": late})
    with pytest.raises(PartlyDone, match="done on none"):
        raise_failed("work", {}, {"a": late, "b": RequestRefused(16, "no")})
