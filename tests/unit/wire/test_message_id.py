"""Ids and packed hosts."""

from __future__ import annotations

import pytest

from cometmq.errors import UsageError
from cometmq.wire import message_id


def test_hosts_are_address_bytes_and_a_port() -> None:
    assert message_id.pack_host("10.0.0.1", 10911) == bytes.fromhex("0A00000100002A9F")
    packed = message_id.pack_host("fe80::1%eth0", 1)
    assert packed == bytes.fromhex("FE80000000000000000000000000000100000001")
    assert message_id.unpack_host(packed) == ("fe80::1", 1)


def test_ipv6_id_has_56_digits() -> None:
    text = message_id.offset_id(message_id.pack_host("2001:db8::1", 10911), 4096)
    assert text == "20010DB8000000000000000000000001" + "00002A9F" + "0000000000001000"
    assert message_id.parse_offset_id(text) == ("2001:db8::1", 10911, 4096)
    assert message_id.parse_offset_id(text.lower()) == ("2001:db8::1", 10911, 4096)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0A00000100002A9F00000000000010",
        "0A00000100002A9F000000000000100",
        "0A00000100002A9F00000000000010000",
        "0A00000100002A9F00000000000010zz",
        "0A00000100002A9F 0000000000001000",
        "\uff10A00000100002A9F0000000000001000",
        "00" * 17,
    ],
)
def test_what_is_no_offset_id(text: str) -> None:
    with pytest.raises(UsageError, match="offset message id"):
        message_id.parse_offset_id(text)


def test_unique_id_parts() -> None:
    host = bytes((10, 0, 0, 1))
    text = message_id.unique_id(host, pid=0x12345, node=-2, month_ms=0x0ABBCCDD, counter=0x1FFFE)
    assert text == "0A000001" + "2345" + "FFFFFFFE" + "0ABBCCDD" + "FFFE"
    assert len(message_id.unique_id(bytes(16), 1, 2, 3, 4)) == 56
