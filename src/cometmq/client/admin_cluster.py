"""Clusters, brokers and name servers: who there is, how they do, how they are set.

Owns: 25, 26, 28, 100 to 102, 106, 205, 219, 318, 319 and 327. One rule: what concerns name servers
is told to every one of them, because they don't talk to each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from cometmq.client.admin_asking import (
    Brokers,
    UnknownName,
    accepted,
    brokers_of,
    call,
    call_name_servers,
    each,
    is_address,
)
from cometmq.client.session import Session
from cometmq.errors import Unreachable, UsageError
from cometmq.wire import bodies
from cometmq.wire.codes import RequestCode, ResponseCode


async def clusters(session: Session) -> dict[str, dict[str, dict[int, str]]]:
    """cluster -> broker -> broker id -> address; id 0 is the leader."""
    found = await brokers_of(session)
    return {
        cluster: {
            name: dict(found.by_name[name].addresses) for name in names if name in found.by_name
        }
        for cluster, names in found.clusters.items()
    }


async def place(session: Session, broker: str, *, to_change: bool = False) -> str:
    """The address of a broker given by name or address."""
    if is_address(broker):
        return broker
    found = await brokers_of(session)
    address = found.leader(broker) if to_change else found.any(broker)
    if not address:
        raise Unreachable(f"broker {broker} has no leader registered")
    return address


async def broker_status(session: Session, broker: str) -> dict[str, str]:
    """28."""
    address = await place(session, broker)
    answer = await call(session, address, RequestCode.GET_BROKER_RUNTIME_INFO, name=broker)
    table = bodies.drop_nulls(bodies.load_object(answer.body, "status").get("table") or {})
    return {name: str(value) for name, value in sorted(table.items())}


async def broker_config(session: Session, broker: str) -> dict[str, str]:
    """26."""
    address = await place(session, broker)
    answer = await call(session, address, RequestCode.GET_BROKER_CONFIG, name=broker)
    return bodies.parse_properties_text(answer.body)


async def update_broker_config(
    session: Session,
    settings: Mapping[str, str],
    broker: str | None = None,
    cluster: str | None = None,
) -> list[str]:
    """25: to one broker, or to all leaders of a cluster, or to all there are; their names."""
    body = properties_text(settings)
    if broker is not None and is_address(broker):
        places = {broker: broker}
    else:
        places = (await brokers_of(session)).leaders(cluster, broker)

    async def ask(name: str, address: str) -> None:
        await call(session, address, RequestCode.UPDATE_BROKER_CONFIG, {}, body, name=name)

    return list(await each(places, ask, "update of the broker's config"))


def properties_text(settings: Mapping[str, str]) -> bytes:
    if not settings:
        raise UsageError("no setting to change")
    for key, value in settings.items():
        # A backslash is an escape to Java's reader and itself to others.
        if not key or set("\r\n\\") & set(key + value) or set("=: #!") & set(key):
            raise UsageError(f"setting {key!r}={value!r} can't be written as a line key=value")
    return "".join(f"{key}={value}\n" for key, value in settings.items()).encode()


async def name_server_config(session: Session) -> dict[str, dict[str, str]]:
    """319: address -> settings."""
    what = "reading the name servers' config"
    answers = await call_name_servers(session, RequestCode.GET_NAMESRV_CONFIG, {}, what=what)
    return {at: bodies.parse_properties_text(answer.body) for at, answer in answers.items()}


async def update_name_server_config(session: Session, settings: Mapping[str, str]) -> list[str]:
    """318."""
    body = properties_text(settings)
    what = "update of the name servers' config"
    return list(
        await call_name_servers(session, RequestCode.UPDATE_NAMESRV_CONFIG, {}, body, what=what)
    )


# --------------------------------------------------------------------------------------------- kv


async def get_kv(session: Session, namespace: str, key: str) -> str | None:
    """101; None if there is no such entry."""
    ext = {"namespace": namespace, "key": key}
    _, answer = await session.names.ask(RequestCode.GET_KV_CONFIG, ext)
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return None
    return accepted(answer).ext.get("value", "")


async def list_kv(session: Session, namespace: str) -> dict[str, str]:
    """219; empty if there is no such namespace."""
    _, answer = await session.names.ask(
        RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": namespace}
    )
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return {}
    raw = bodies.load_object(accepted(answer).body, "kv list").get("table") or {}
    return {name: str(value) for name, value in sorted(bodies.drop_nulls(raw).items())}


async def put_kv(session: Session, namespace: str, key: str, value: str) -> None:
    """100."""
    ext = {"namespace": namespace, "key": key, "value": value}
    what = f"putting {namespace}/{key}"
    await call_name_servers(session, RequestCode.PUT_KV_CONFIG, ext, what=what)


async def delete_kv(session: Session, namespace: str, key: str) -> None:
    """102."""
    ext = {"namespace": namespace, "key": key}
    what = f"deleting {namespace}/{key}"
    await call_name_servers(session, RequestCode.DELETE_KV_CONFIG, ext, what=what)


# ------------------------------------------------------------------------------------- permission


async def wipe_write_perm(session: Session, broker: str) -> dict[str, int]:
    """205: how many topics changed, by name server."""
    return await _change_perm(
        session, broker, RequestCode.WIPE_WRITE_PERM_OF_BROKER, "wipeTopicCount"
    )


async def add_write_perm(session: Session, broker: str) -> dict[str, int]:
    """327."""
    return await _change_perm(
        session, broker, RequestCode.ADD_WRITE_PERM_OF_BROKER, "addTopicCount"
    )


async def _change_perm(session: Session, broker: str, code: int, field: str) -> dict[str, int]:
    known: Brokers = await brokers_of(session)
    if broker not in known.by_name:
        raise UnknownName("broker", broker, list(known.by_name))
    what = f"changing what {broker} may do"
    answers = await call_name_servers(session, code, {"brokerName": broker}, what=what)
    return {address: int(answer.ext.get(field, "0")) for address, answer in answers.items()}
