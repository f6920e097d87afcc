"""Makes docs/config.md and docs/protocol.md from the tables in the source, and the option tables
of docs/spark.md, whose other text is written by hand.

`--check` writes nothing and exits 1 if a page is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cometmq import config
from cometmq.broker.requests import TABLE as BROKER_TABLE
from cometmq.config import BROKER_KEYS, NAMESERVER_KEYS, BrokerConfig, Key, NameServerConfig
from cometmq.nameserver.requests import TABLE as NAMESERVER_TABLE
from cometmq.spark import sink_options, source_options
from cometmq.spark.options import Option, span_ms, timeout_ms
from cometmq.wire.codes import RequestCode, ResponseCode

HERE = Path(__file__).parent
NOTE = "<!-- Made by `make docs` from the tables in the source; do not edit. -->\n\n"


def _range(row: Key) -> str:
    if row.choices:
        return ", ".join(f"`{one}`" for one in row.choices)
    if row.low is not None and row.high is not None:
        return f"{row.low} to {row.high}"
    return f"at least {row.low}" if row.low is not None else ""


def _rows(keys: tuple[Key, ...], defaults: BrokerConfig | NameServerConfig) -> str:
    values = config.to_settings(defaults)
    lines = ["| key | default | allowed | live | meaning |", "|---|---|---|---|---|"]
    for row in keys:
        default = f"`{values[row.name]}`" if values[row.name] else ""
        mark = " (CometMQ's own)" if row.is_ours else ""
        live = "yes" if row.is_live else ""
        lines.append(f"| `{row.name}` | {default} | {_range(row)} | {live} | {row.note}{mark} |")
    return "\n".join(lines)


def _idle(keys: frozenset[str], known: tuple[Key, ...]) -> str:
    names = sorted(keys - {row.name for row in known} - config.REFUSED_BROKER_KEYS.keys())
    return ", ".join(f"`{name}`" for name in names)


def config_page() -> str:
    return (
        NOTE
        + "# Settings\n\n"
        + "Files are RocketMQ's `broker.conf` and `namesrv.conf`: `key = value`, `#` comments. "
        + "Flags win over the file. An unknown key is an error that suggests the nearest one. "
        + "*Live* keys may be changed at run time (`mqadmin updateBrokerConfig`); all others are "
        + "refused there, and a refused update changes nothing.\n\n"
        + "## Broker\n\n"
        + _rows(BROKER_KEYS, BrokerConfig())
        + "\n\n`bindAddress` is where the broker listens, `brokerIP1` what it tells clients. They "
        + "are separate: behind a NAT or in a container set `brokerIP1` to what clients can "
        + "reach.\n\n### Refused unless harmless\n\n"
        + "These keys promise something that this version does not do, so any value but the one "
        + "shown is an error: "
        + ", ".join(f"`{key} = {value}`" for key, value in config.REFUSED_BROKER_KEYS.items())
        + ". `storePathCommitLog` must be `commitlog` below `storePathRootDir`.\n"
        + "\n### Known to RocketMQ, accepted, without effect here\n\n"
        + _idle(config.IDLE_BROKER_KEYS, BROKER_KEYS)
        + "\n\n## Name server\n\n"
        + _rows(NAMESERVER_KEYS, NameServerConfig())
        + "\n\n### Known to RocketMQ, accepted, without effect here\n\n"
        + _idle(config.IDLE_NAMESERVER_KEYS, NAMESERVER_KEYS)
        + "\n"
    )


def _codes(table: object) -> str:
    assert isinstance(table, dict)
    lines = ["| code | request | where |", "|---|---|---|"]
    for code in sorted(table):
        handler = table[code].handler
        where = f"{handler.__module__.removeprefix('cometmq.')}.{handler.__name__}"
        lines.append(f"| {int(code)} | {RequestCode(code).name} | `{where}` |")
    return "\n".join(lines)


def protocol_page() -> str:
    answers = "\n".join(f"| {int(code)} | {code.name} |" for code in ResponseCode)
    return (
        NOTE
        + "# Requests that are answered\n\n"
        + "RocketMQ's remoting protocol, with JSON and binary headers; an answer comes in the "
        + "request's own serialization. Codes that are not listed are answered with 3.\n\n"
        + "## Broker\n\n"
        + _codes(BROKER_TABLE)
        + "\n\n## Name server\n\n"
        + _codes(NAMESERVER_TABLE)
        + "\n\n## Response codes\n\n| code | name |\n|---|---|\n"
        + answers
        + "\n"
    )


def _option_default(row: Option) -> str:
    if row.is_required:
        return "required"
    value = row.default
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if row.read in (span_ms, timeout_ms):
        return f"`{value // 60_000}m`" if value % 60_000 == 0 else f"`{value // 1000}s`"
    return f"`{value}`"


def _options(table: Sequence[Option], only: Sequence[tuple[str, Sequence[str]]] = ()) -> str:
    """`only`: names of options that are for one use, with what it is called."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for row in table:
        marks = [f"{kind} only" for kind, names in only if row.name in names]
        said = [mark for mark in marks if not row.help.startswith(mark)]
        text = "; ".join([*said, row.help]).replace("|", "\\|")
        lines.append(f"| `{row.name}` | {_option_default(row)} | {text} |")
    return "\n".join(lines)


def spark_page() -> str:
    """The page as it stands, with fresh tables between the marks."""
    text = (HERE / "spark.md").read_text()
    only = (("stream", source_options.STREAM_ONLY), ("batch", source_options.BATCH_ONLY))
    tables = {
        "source": _options(source_options.TABLE, only),
        "sink": _options(sink_options.TABLE),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name} options: made by `make docs` -->", f"<!-- end of {name} -->"
        before, mark, rest = text.partition(begin)
        _, end_mark, after = rest.partition(end)
        assert mark and end_mark, f"docs/spark.md has lost its marks {begin} and {end}"
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def main() -> int:
    stale = []
    for name, text in (
        ("config.md", config_page()),
        ("protocol.md", protocol_page()),
        ("spark.md", spark_page()),
    ):
        path = HERE / name
        if "--check" in sys.argv:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.write_text(text)
    if stale:
        print(f"stale: {', '.join(stale)}; run make docs")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
