"""The `cometmq` command: reads the line, then calls what it names.

Owns: arguments and exit codes (0 done, 1 refused, 2 misused). One rule: no work here, and nothing
is imported that the chosen command does not need.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cometmq.cli import message, pipeline


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "version":
        from cometmq import __version__

        print(f"cometmq {__version__}")
        return 0
    if arguments.command == "message":
        return message.command(arguments)
    if arguments.command == "pipeline":
        return pipeline.command(arguments)
    from cometmq.cli import serve

    return serve.command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cometmq",
        description="CometMQ: a name server and a broker that speak RocketMQ's protocol.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="name server and broker in one process", allow_abbrev=False)
    up.add_argument("--host", default=None, help="address to listen on (127.0.0.1)")
    up.add_argument("--namesrv-port", type=int, default=9876, help="port, 0 picks one (9876)")
    up.add_argument("--broker-port", type=int, default=None, help="port, 0 picks one (10911)")
    up.add_argument("--store", default=None, help="store directory (~/.cometmq/store)")
    up.add_argument("--broker-conf", default=None, metavar="FILE", help="RocketMQ's broker.conf")
    _logging(up)

    namesrv = commands.add_parser("namesrv", help="a name server", allow_abbrev=False)
    namesrv.add_argument("--host", default=None, help="address to listen on (127.0.0.1)")
    namesrv.add_argument("--port", type=int, default=None, help="port, 0 picks one (9876)")
    namesrv.add_argument("-c", "--conf", default=None, metavar="FILE", help="namesrv.conf")
    _logging(namesrv)

    broker = commands.add_parser("broker", help="a broker", allow_abbrev=False)
    broker.add_argument(
        "-n", "--namesrv", default=None, metavar="ADDRS", help="host:port;host:port"
    )
    broker.add_argument("-c", "--conf", default=None, metavar="FILE", help="broker.conf")
    broker.add_argument("--host", default=None, help="address to listen on (127.0.0.1)")
    broker.add_argument("--port", type=int, default=None, help="port, 0 picks one (10911)")
    broker.add_argument("--store", default=None, help="store directory (~/.cometmq/store)")
    broker.add_argument(
        "--copy-topics",
        action="store_true",
        help="copy all topics and groups from a running broker of the cluster before starting",
    )
    _logging(broker)

    message.add_parser(commands)
    pipeline.add_parser(commands)

    commands.add_parser("version", help="print the version")
    return parser


def _logging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level",
        default="INFO",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="what goes to standard error (INFO)",
    )


if __name__ == "__main__":
    sys.exit(main())
