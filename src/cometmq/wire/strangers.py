"""Peers that speak another protocol to a RocketMQ port, and what to tell them.

Owns: recognising HTTP, HTTP/2 (gRPC), TLS and PROXY preambles by their first bytes, the answer in
the stranger's own language and the hint for our log. One rule: only bytes that can't be a frame of
ours are recognised: their first four bytes, read as a length, are more than 200 MiB. Who allows
frames that large asks only about bytes that the frame reader refused.
"""

from __future__ import annotations

import msgspec

_HTTP = (b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC", b"CONN", b"TRAC")
_HTTP2 = b"PRI "
_PROXY = (b"PROX", b"\r\n\r\n")
_TLS_HANDSHAKE = 0x16

_HTTP_HINT = (
    "this port speaks RocketMQ's remoting protocol, not HTTP; point a RocketMQ client at it "
    "(name server port 9876, broker port 10911 by default)"
)
_GRPC_HINT = (
    "this port speaks RocketMQ's remoting protocol, not gRPC: use the classic (remoting) RocketMQ "
    "client; gRPC clients of 5.x need a proxy"
)
_TLS_HINT = (
    "a TLS handshake came to a plain port: turn TLS off in the client "
    "(Java: -Dtls.enable=false), this server has no TLS here"
)
_PROXY_HINT = "a PROXY protocol preamble came in: turn it off for this port in the load balancer"


class Stranger(msgspec.Struct, frozen=True):
    """What came in by mistake: its name, the hint for the log, the bytes to answer with."""

    protocol: str
    hint: str
    answer: bytes


def recognise(first: bytes) -> Stranger | None:
    """Who opened this connection with these first bytes; None if it may be one of ours."""
    if len(first) < 4:
        return None
    head = first[:4]
    if head == _HTTP2:
        return Stranger("gRPC", _GRPC_HINT, _http2_goaway(_GRPC_HINT))
    if head in _HTTP:
        text = _HTTP_HINT.encode() + b"\n"
        answer = (
            b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(text)
        )
        return Stranger("HTTP", _HTTP_HINT, answer + text)
    if head[0] == _TLS_HANDSHAKE and head[1] == 3:
        # alert record, TLS 1.2, fatal handshake_failure
        return Stranger("TLS", _TLS_HINT, bytes((0x15, 3, 3, 0, 2, 2, 40)))
    if head in _PROXY:
        return Stranger("PROXY", _PROXY_HINT, b"")
    return None


def _http2_goaway(hint: str) -> bytes:
    """An empty SETTINGS frame, then GOAWAY with HTTP_1_1_REQUIRED and the hint as debug data."""
    debug = hint.encode()
    settings = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    payload = (0).to_bytes(4, "big") + (0xD).to_bytes(4, "big") + debug
    return settings + len(payload).to_bytes(3, "big") + bytes((7, 0, 0, 0, 0, 0)) + payload
