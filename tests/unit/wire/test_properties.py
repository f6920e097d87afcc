"""The property string: what Java's reader takes and what it drops."""

from __future__ import annotations

import pytest

from cometmq.wire import properties


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("A\x01b\x02", {"A": "b"}),
        ("A\x01b", {"A": "b"}),
        ("A\x01b\x02C\x01d", {"A": "b", "C": "d"}),
        ("\x02\x02A\x01b\x02\x02", {"A": "b"}),
        ("A\x01b\x02junk\x02C\x01d\x02", {"A": "b", "C": "d"}),
        ("A\x01b\x02A\x01c\x02", {"A": "c"}),
        ("A\x01\x02", {}),
        ("\x01b\x02", {}),
        ("A\x01b\x01c\x02", {"A": "b\x01c"}),
        ("A\x01b\x02A\x01\x02", {"A": "b"}),
    ],
)
def test_parse(text: str, found: dict[str, str]) -> None:
    assert properties.parse(text) == found
    for name in ("A", "C", "junk", "b"):
        assert properties.get(text, name) == found.get(name), name


def test_build_ends_with_the_separator() -> None:
    assert properties.build({"A": "b", "C": "d"}) == "A\x01b\x02C\x01d\x02"
    assert properties.build({}) == ""


def test_names_are_whole() -> None:
    text = "XKEYS\x01a\x02KEYS2\x01b\x02V\x01KEYS\x02"
    assert properties.get(text, "KEYS") is None
    assert not properties.has(text, "KEYS")
    assert properties.has(text, "XKEYS")
    assert properties.has(text, "KEYS2")
    assert not properties.has(text, "ABSENT")
    assert properties.has("A\x01\x02", "A"), "an empty value still carries the name"
