"""Where a broadcasting consumer keeps how far it has read: a file on the client's own disk.

Owns: `<folder>/<client id>/<group>/offsets.json`, its backup, and their recovery; RocketMQ's
LocalFileOffsetStore reads and writes the same file. One rule: at every moment, whatever crashes, a
whole version stands on disk as offsets.json or as offsets.json.bak.

    {"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"orders"}:5}}

The keys are objects, as fastjson writes them. Not for several threads or processes at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from cometmq.errors import BodyError, StoreCorrupt, StoreError, UsageError
from cometmq.message import MessageQueue
from cometmq.wire import fastjson
from cometmq.wire.bodies import queue_key

log = logging.getLogger("cometmq.client")

FOLDER = ".rocketmq_offsets"  # in the home directory, as Java has it
MAX_FILE_BYTES = 64 * 1024 * 1024  # some 500,000 queues; more is not a file of ours
MAX_NAME_BYTES = 255  # of one part of a path on Linux
MAX_OFFSET = 2**63 - 1


class LocalOffsets:
    """The offsets file of one group on one client. Nothing is kept in memory."""

    def __init__(self, client_id: str, group: str, folder: Path | str | None = None) -> None:
        """`folder`: Java's rocketmq.client.localOffsetStoreDir; else ~/.rocketmq_offsets."""
        root = Path.home() / FOLDER if folder is None else Path(folder)
        self.path = (
            root / _checked("client id", client_id) / _checked("group", group) / "offsets.json"
        )
        self._backup = self.path.with_name("offsets.json.bak")

    def read(self) -> dict[MessageQueue, int]:
        """What is stored; nothing if there is no file yet.

        Raises StoreCorrupt if there is a file but no version of it can be read: starting anew would
        silently skip messages or repeat them all.
        """
        offsets, _ = self._read()
        return offsets

    def write(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Put these over what is stored and make it durable; other queues stay as they are."""
        stored, is_main_whole = self._read()
        merged = {**stored, **offsets}
        if is_main_whole and merged == stored:
            return
        table = {queue_key(one.topic, one.broker, one.queue_id): at for one, at in merged.items()}
        content = fastjson.dumps({"offsetTable": table})
        beside = self.path.with_name("offsets.json.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if is_main_whole:  # a damaged one must not take a good backup's place
                os.replace(self.path, self._backup)
            os.replace(beside, self.path)
        except OSError as error:
            raise StoreError(f"offsets can't be written to {self.path}: {error}") from error

    def _read(self) -> tuple[dict[MessageQueue, int], bool]:
        """The offsets, and whether they come from the file itself and not from its backup."""
        damage = ""
        for path in (self.path, self._backup):
            try:
                content = _content(path)
                if not content:  # missing, or emptied by a crash of the machine: look further
                    continue
                found = _parse(content)
            except BodyError as error:
                log.error("offsets_damaged path=%s reason=%s", path, error)
                damage = damage or f"{path}: {error}"
                continue
            if path is not self.path:
                log.warning("offsets_restored path=%s queue_count=%d", path, len(found))
            return found, path is self.path
        if damage:
            raise StoreCorrupt(
                f"a consumer's offsets can't be read and there is no whole backup ({damage}); "
                "repair the file, or delete it to start as a new consumer"
            )
        return {}, False


def _checked(what: str, name: str) -> str:
    """A name that may become one part of a path."""
    if not name or name == "." or ".." in name or any(sign in name for sign in "/\\\0"):
        raise UsageError(
            f"the {what} {name!r} can't name a folder: it must not be empty or '.', nor have '/', "
            "'\\', '..' or NUL in it"
        )
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise UsageError(f"the {what} {name[:40]!r}… is longer than {MAX_NAME_BYTES} bytes")
    return name


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StoreError(f"offsets can't be read from {path}: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise BodyError(f"larger than {MAX_FILE_BYTES} bytes")
    return content


def _parse(content: bytes) -> dict[MessageQueue, int]:
    body = fastjson.loads(content)
    table = body.get("offsetTable") if isinstance(body, dict) else None
    if not isinstance(table, dict):
        raise BodyError("no object offsetTable")
    return {_queue(key): _offset(at) for key, at in table.items()}


def _queue(key: object) -> MessageQueue:
    if isinstance(key, str):  # other writers put the object into a string, to be standard JSON
        key = fastjson.loads(key.encode("utf-8"))
    if isinstance(key, dict):
        topic, broker, queue_id = key.get("topic"), key.get("brokerName"), key.get("queueId")
        if isinstance(topic, str) and isinstance(broker, str) and type(queue_id) is int:
            return MessageQueue(topic, broker, queue_id)
    raise BodyError(f"{key!r} does not name a queue")


def _offset(value: object) -> int:
    if type(value) is int and -1 <= value <= MAX_OFFSET:
        return value
    raise BodyError(f"{value!r} is not an offset")
