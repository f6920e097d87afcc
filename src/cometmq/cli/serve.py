"""`cometmq up`, `namesrv` and `broker`: settings from defaults, file and flags, then run.

Owns: which source wins (flag, then file, then environment, then default). One rule: a wrong setting
is one line on standard error and exit code 1; nothing has been started by then.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from cometmq import config as settings
from cometmq.config import BrokerConfig, NameServerConfig
from cometmq.errors import CometError, ConfigError
from cometmq.wire.bodies import GroupConfig, TopicConfig

log = logging.getLogger("cometmq.cli")


def command(arguments: argparse.Namespace) -> int:
    """Start what was asked for and serve until a signal."""
    logging.basicConfig(
        level=arguments.log_level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    from cometmq import run

    try:
        if arguments.command == "up":
            namesrv, broker = _up(arguments)
            return run.run(run.up(namesrv, broker))
        if arguments.command == "namesrv":
            return run.run(run.name_server_alone(_name_server(arguments)))
        broker = _broker(arguments)
        copied = ([], []) if not arguments.copy_topics else _copy(broker)
        return run.run(run.broker_alone(broker, copied))
    except CometError as error:
        print(f"cometmq: {error}", file=sys.stderr)
        return 1


def _read(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}") from None
    return settings.parse_conf(text, path)


def _settings(
    kind: type[BrokerConfig] | type[NameServerConfig],
    path: str | None,
    flags: dict[str, str | int | None],
) -> dict[str, str]:
    found = _read(path)
    idle = settings.idle_keys(kind, found)
    if idle:
        log.info("%s: known to RocketMQ, without effect here: %s", path, ", ".join(idle))
    found.update({key: str(value) for key, value in flags.items() if value is not None})
    return found


def _up(arguments: argparse.Namespace) -> tuple[NameServerConfig, BrokerConfig]:
    flags: dict[str, str | int | None] = {
        "bindAddress": arguments.host,
        "listenPort": arguments.broker_port,
        "storePathRootDir": arguments.store,
    }
    found = _settings(BrokerConfig, arguments.broker_conf, flags)
    found.pop("namesrvAddr", None)  # `up` is its own name server
    broker = _complete(
        settings.apply(BrokerConfig(), found, source=arguments.broker_conf or "command line")
    )
    namesrv = NameServerConfig(
        bind_host=broker.bind_host,
        listen_port=arguments.namesrv_port,
        kv_path=str(Path(broker.store_path) / "namesrv" / "kvConfig.json"),
    )
    return namesrv, broker


def _name_server(arguments: argparse.Namespace) -> NameServerConfig:
    flags: dict[str, str | int | None] = {
        "bindAddress": arguments.host,
        "listenPort": arguments.port,
    }
    found = _settings(NameServerConfig, arguments.conf, flags)
    return settings.apply(NameServerConfig(), found, source=arguments.conf or "command line")


def _broker(arguments: argparse.Namespace) -> BrokerConfig:
    flags: dict[str, str | int | None] = {
        "namesrvAddr": arguments.namesrv or os.environ.get("NAMESRV_ADDR"),
        "bindAddress": arguments.host,
        "listenPort": arguments.port,
        "storePathRootDir": arguments.store,
    }
    if arguments.namesrv is None and "namesrvAddr" in _read(arguments.conf):
        flags["namesrvAddr"] = None
    found = _settings(BrokerConfig, arguments.conf, flags)
    return _complete(settings.apply(BrokerConfig(), found, source=arguments.conf or "command line"))


def _complete(config: BrokerConfig) -> BrokerConfig:
    """Fill in what depends on the machine, and check what would become a path or a topic."""
    import msgspec

    from cometmq.broker import names
    from cometmq.run import default_folder

    for key, value in (("brokerName", config.name), ("brokerClusterName", config.cluster)):
        problem = names.own_name_problem(value)
        if problem is not None:
            raise ConfigError(f"{key}={value!r} {problem}")
    store = config.store_path or default_folder("store")
    return msgspec.structs.replace(config, store_path=str(Path(store).expanduser().resolve()))


def _copy(config: BrokerConfig) -> tuple[list[TopicConfig], list[GroupConfig]]:
    from cometmq.client.cluster_copy import copy_cluster

    if not config.namesrv:
        raise ConfigError("--copy-topics needs a name server: -n host:port or namesrvAddr")
    topics, groups = copy_cluster(config.namesrv, config.cluster, config.name)
    log.info("copied topics=%d groups=%d from cluster=%s", len(topics), len(groups), config.cluster)
    return topics, groups
