"""Peers of another protocol: recognised by their first bytes, answered in their own language."""

from __future__ import annotations

import http.client
import io

import pytest

from cometmq.wire.strangers import recognise


class _Socket:
    """What http.client needs of a socket."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.data)


@pytest.mark.parametrize(
    "method", ["GET", "POST", "PUT", "HEAD", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE"]
)
def test_http_gets_an_answer_that_http_understands(method: str) -> None:
    stranger = recognise(f"{method} / HTTP/1.1\r\n".encode()[:16])
    assert stranger is not None
    assert stranger.protocol == "HTTP"
    response = http.client.HTTPResponse(_Socket(stranger.answer))  # type: ignore[arg-type]
    response.begin()
    assert response.status == 400
    assert response.getheader("Connection") == "close"
    assert response.getheader("Content-Type") == "text/plain; charset=utf-8"
    text = response.read()
    assert text.decode() == stranger.hint + "\n"
    assert response.fp is None or response.fp.read() == b"", "nothing after Content-Length"
    assert stranger.answer.endswith(text)


def test_http2_gets_settings_and_goaway() -> None:
    stranger = recognise(b"PRI * HTTP/2.0\r\n")
    assert stranger is not None
    assert stranger.protocol == "gRPC"
    frames = []
    at = 0
    while at < len(stranger.answer):
        size = int.from_bytes(stranger.answer[at : at + 3], "big")
        kind, flags = stranger.answer[at + 3], stranger.answer[at + 4]
        stream = int.from_bytes(stranger.answer[at + 5 : at + 9], "big")
        payload = stranger.answer[at + 9 : at + 9 + size]
        assert len(payload) == size
        frames.append((kind, flags, stream, payload))
        at += 9 + size
    (settings, goaway) = frames
    assert settings == (0x4, 0, 0, b""), "a server's preface is a SETTINGS frame"
    assert goaway[:3] == (0x7, 0, 0)
    assert goaway[3][:8] == (0).to_bytes(4, "big") + (0xD).to_bytes(4, "big")
    assert goaway[3][8:].decode() == stranger.hint
    assert len(goaway[3]) <= 16384, "the largest frame a peer must take"


@pytest.mark.parametrize("version", [b"\x03\x01", b"\x03\x03"])
def test_tls_gets_a_fatal_alert(version: bytes) -> None:
    stranger = recognise(b"\x16" + version + b"\x02\x00\x01\x00\x01\xfc\x03\x03")
    assert stranger is not None
    assert stranger.protocol == "TLS"
    kind, major, minor, high, low, level, reason = stranger.answer
    assert (kind, major, minor, high << 8 | low) == (21, 3, 3, 2)
    assert (level, reason) == (2, 40)


@pytest.mark.parametrize(
    "first", [b"PROXY TCP4 10.0.0.1", b"\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c"]
)
def test_proxy_preamble_is_only_logged(first: bytes) -> None:
    stranger = recognise(first[:16])
    assert stranger is not None
    assert (stranger.protocol, stranger.answer) == ("PROXY", b"")
    assert "load balancer" in stranger.hint


@pytest.mark.parametrize(
    "first", [b"", b"G", b"GET", b"get ", b"GETX", b"\x16\x02\0\0", b"\0" * 16]
)
def test_others_are_not_recognised(first: bytes) -> None:
    assert recognise(first) is None
