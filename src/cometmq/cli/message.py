"""`cometmq message`: questions about one message.

Owns: how a message's story is shown. One rule: lines for people on standard output, or one JSON
object with --json; a refusal is one line on standard error and exit code 1. The client is imported
when a command runs, not before.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cometmq.client.story import Event, Story


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The noun and its verbs."""
    noun = commands.add_parser("message", help="look at one message")
    verbs = noun.add_subparsers(dest="verb", required=True, metavar="VERB")
    story = verbs.add_parser(
        "story", help="all that happened to a message: sent, stored, delayed, handled, dead"
    )
    story.add_argument("id", metavar="ID", help="its unique id, or the broker's offset id")
    story.add_argument("-t", "--topic", default=None, help="its topic; else all are looked through")
    story.add_argument(
        "-n", "--namesrv", default=None, metavar="ADDRS", help="host:port;host:port (NAMESRV_ADDR)"
    )
    story.add_argument(
        "--trace-topic", default="RMQ_SYS_TRACE_TOPIC", help="where clients trace to"
    )
    story.add_argument("--json", action="store_true", help="one JSON object, times in ms")


def command(arguments: argparse.Namespace) -> int:
    """Ask, and print; the exit code."""
    import msgspec

    from cometmq.client.blocking_admin import Admin
    from cometmq.errors import CometError

    namesrv = arguments.namesrv or os.environ.get("NAMESRV_ADDR")
    if not namesrv:
        print("cometmq: no name server: -n host:port or NAMESRV_ADDR", file=sys.stderr)
        return 2
    try:
        with Admin(namesrv) as admin:
            found = admin.story(arguments.id, arguments.topic, trace_topic=arguments.trace_topic)
    except CometError as error:
        print(f"cometmq: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        shown: Any = msgspec.json.format(msgspec.json.encode(found), indent=2)
        print(shown.decode())
    else:
        print("\n".join(lines(found)))
    return 0


def lines(story: Story) -> list[str]:
    """The story as a time-line."""
    shown = [f"message {story.message_id} of topic {story.topic}: {story.state}", ""]
    day = ""
    for event in story.events:
        at = moment(event.time_ms)
        if at[:10] != day:
            day = at[:10]
            shown.append(day)
        shown.append(f"  {at[11:]:12}  {event.what:12}  {_text(event)}")
    if story.groups:
        shown.append("")
    width = max((len(one.group) for one in story.groups), default=0)
    for one in story.groups:
        tries = f", {one.attempts} {'try' if one.attempts == 1 else 'tries'}"
        known = tries if one.attempts else ""
        shown.append(f"group {one.group:{width}}  {one.state}{known}: {one.text}")
    if story.unknown:
        shown += ["", "not known:", *(f"  {one}" for one in story.unknown)]
    return shown


def _text(event: Event) -> str:
    until = f", due {moment(event.until_ms)}" if event.until_ms else ""
    source = " [trace]" if event.source == "trace" else ""
    return f"{event.text}{until}{source}"


def moment(ms: int) -> str:
    """Local time with milliseconds; a dash where none is known."""
    if ms <= 0:
        return f"{'-':10} {'-':12}"
    return datetime.fromtimestamp(ms / 1e3).isoformat(" ", "milliseconds")
