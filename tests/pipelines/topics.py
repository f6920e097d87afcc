"""What the tests of the pipelines share: messages with a birth of one's own choice, and lakes
read back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.dataset as dataset

from cometmq.client.remote import Remote
from cometmq.testing.local import LocalBroker
from cometmq.wire import headers, properties
from cometmq.wire.codes import RequestCode


def send_born(broker: LocalBroker, topic: str, bodies: dict[bytes, int]) -> None:
    """Bodies with the time (ms) at which they say they were born, in turn to four queues."""
    with Remote(broker.broker_address) as remote:
        for number, (body, born_ms) in enumerate(bodies.items()):
            header = headers.SendHeader(
                producerGroup="tests",
                topic=topic,
                defaultTopic="TBW102",
                defaultTopicQueueNums=4,
                queueId=number % 4,
                sysFlag=0,
                bornTimestamp=born_ms,
                flag=0,
                properties=properties.build({"UNIQ_KEY": f"{topic}-{body.hex()}"}),
            )
            ext = headers.send_v2_ext(header)
            assert remote.ask(RequestCode.SEND_MESSAGE_V2, ext, body).code == 0


def lake_files(lake: Path) -> list[Path]:
    """What a reader of a lake finds, also while someone writes to it: folders that are not for
    readers (_cometmq, _temporary) are not looked into, and what vanishes meanwhile is not there."""
    found: list[Path] = []
    for folder, inner, names in os.walk(lake):  # a folder that has gone is passed over
        inner[:] = [name for name in inner if not name.startswith(("_", "."))]
        found += [Path(folder, name) for name in names if name.endswith(".parquet")]
    return sorted(found)


def table(path: Path, **more: Any) -> list[dict[str, Any]]:
    """A Parquet table, by another engine than the one that wrote."""
    files = [str(one) for one in lake_files(path)]
    found = dataset.dataset(files, format="parquet", **more).to_table()
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows
