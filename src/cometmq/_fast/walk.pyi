from typing import Any

import numpy as np

_Bytes = bytes | np.ndarray[Any, np.dtype[np.uint8]]
_Ints = np.ndarray[Any, np.dtype[np.int64]]
_ShortInts = np.ndarray[Any, np.dtype[np.int32]]

def read_records(
    data: _Bytes, begins: _Ints, ends: _Ints, names: tuple[bytes, ...]
) -> tuple[int, int, bytes, bytes, bytes, bool, bytes | None]: ...
def pull_requests(pieces: tuple[bytes, ...], pulls: list[tuple[int, int, int]]) -> bytes: ...
def stretch_requests(
    pieces: tuple[bytes, ...], begin: int, step: int, count: int, first: int
) -> bytes: ...
def take_answers(
    source: _Bytes,
    at: int,
    end: int,
    limit_bytes: int,
    first: int,
    planned: _Ints,
    places: _Ints,
) -> tuple[int, list[tuple[int, int, int, int, tuple[_Bytes, int, int], None]], int]: ...
def cut(body: _Bytes, begins: _Ints, ends: _Ints) -> tuple[bytes, bytes]: ...
def cut_places(body: _Bytes, bounds: _ShortInts) -> tuple[int, bytes, bytes, bytes]: ...
