"""Reading back small state files (config/*.json).

Owns: what to do when such a file is missing, empty or damaged. One rule: a bad file never stops a
broker and is never thrown away: it is set aside as `<name>.corrupt`, said aloud, and the former
version `<name>.bak` is used (RocketMQ's bug 1498: a half-written file lost all offsets).
"""

from __future__ import annotations

import logging
from typing import Any

from cometmq.errors import BodyError
from cometmq.ports import Files
from cometmq.wire import fastjson

log = logging.getLogger("cometmq.store")


def load_state(files: Files, name: str) -> dict[str, Any] | None:
    """The file's JSON object, else its backup's, else None."""
    for candidate in (name, name + ".bak"):
        content = files.read(candidate)
        if content is None:
            continue
        try:
            found = fastjson.loads(content)
            reason = f"not an object but {type(found).__name__}"
        except BodyError as error:
            found, reason = None, str(error)
        if isinstance(found, dict):
            if candidate != name:
                log.warning("state_file_restored name=%s from=%s", name, candidate)
            return found
        log.error(
            "state_file_corrupt name=%s size=%d reason=%s kept_as=%s.corrupt",
            candidate,
            len(content),
            reason,
            candidate,
        )
        files.rename(candidate, candidate + ".corrupt")
    return None
