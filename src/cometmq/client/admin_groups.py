"""Consumer groups: their settings.

Owns: 200, 201 and 207. One rule: a group is what its brokers have settings of; each broker has its
own, and they may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cometmq.client.admin_asking import (
    UnknownName,
    brokers_of,
    call,
    call_each,
    each,
    own_names,
)
from cometmq.client.admin_topics import DLQ_PREFIX, RETRY_PREFIX, delete_topic, exists
from cometmq.client.session import Session
from cometmq.wire import bodies, fastjson
from cometmq.wire.codes import RequestCode

SYSTEM_GROUPS = frozenset(
    "TOOLS_CONSUMER FILTERSRV_CONSUMER SELF_TEST_C_GROUP SELF_TEST_P_GROUP CID_ONS-HTTP-PROXY "
    "CID_ONSAPI_PULL CID_ONSAPI_PERMISSION CID_ONSAPI_OWNER __MONITOR_CONSUMER "
    "CLIENT_INNER_PRODUCER DEFAULT_CONSUMER DEFAULT_PRODUCER "
    "CID_DefaultHeartBeatSyncerTopic".split()
)
SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"


class GroupOnBroker(msgspec.Struct, frozen=True):
    """A group's settings on one broker."""

    name: str
    broker: str
    consume: bool
    consume_broadcast: bool
    consume_from_min: bool
    orderly: bool
    retry_max_times: int
    retry_queues: int
    consume_timeout_minutes: int
    attributes: dict[str, str]


async def put_group(
    session: Session,
    name: str,
    changes: Mapping[str, object],
    attributes: Mapping[str, str | None] | None,
    *,
    cluster: str | None = None,
    brokers: str | Sequence[str] | None = None,
) -> list[str]:
    """200 with the wire's fields `changes` on top of RocketMQ's defaults; the brokers' names."""
    fields: dict[str, Any] = {
        "brokerId": 0,
        "consumeBroadcastEnable": True,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeMessageOrderly": False,
        "consumeTimeoutMinute": 15,
        "groupName": session.wrap(name),
        "groupRetryPolicy": {"type": "CUSTOMIZED"},
        "groupSysFlag": 0,
        "notifyConsumerIdsChangedEnable": True,
        "retryMaxTimes": 16,
        "retryQueueNums": 1,
        "whichBrokerWhenConsumeSlowly": 1,
        **changes,
    }
    places = (await brokers_of(session)).leaders(cluster, brokers)
    await _put(session, dict.fromkeys(places, fields), attributes, places)
    return list(places)


async def update_group(
    session: Session,
    name: str,
    changes: Mapping[str, object],
    attributes: Mapping[str, str | None] | None,
) -> list[str]:
    """Change what is given wherever the group is; the brokers' names."""
    places = (await brokers_of(session)).leaders()
    found = await configs(session, name)
    wanted = {broker: {**now, **changes} for broker, now in found.items()}
    await _put(session, wanted, attributes, {broker: places[broker] for broker in wanted})
    return list(wanted)


async def _put(
    session: Session,
    wanted: Mapping[str, dict[str, Any]],
    attributes: Mapping[str, str | None] | None,
    places: dict[str, str],
) -> None:
    signs = {
        f"-{name}" if value is None else f"+{name}": value or ""
        for name, value in (attributes or {}).items()
    }

    async def ask(broker: str, address: str) -> None:
        fields = {key: value for key, value in wanted[broker].items() if key != "attributes"}
        if signs:  # Apache's brokers read changes here, not the attributes themselves
            fields["attributes"] = signs
        body = fastjson.dumps(fields)
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        await call(session, address, code, {}, body, name=broker)

    await each(places, ask, "setting up the group")


async def delete_group(
    session: Session, name: str, *, with_offsets: bool, with_topics: bool, cluster: str | None
) -> list[str]:
    """207, and its retry and dead letter topics; the names of the brokers that had it."""
    places = (await brokers_of(session)).leaders(cluster)
    had = [broker for broker in await configs(session, name) if broker in places]
    ext = {"groupName": session.wrap(name), "cleanOffset": "true" if with_offsets else "false"}
    what = f"deleting group {name!r}"
    await call_each(session, places, RequestCode.DELETE_SUBSCRIPTIONGROUP, ext, what=what)
    if with_topics:
        for prefix in (RETRY_PREFIX, DLQ_PREFIX):
            if await exists(session, session.wrap(prefix + name)):
                await delete_topic(session, prefix + name, cluster=cluster)
    return had


async def groups(session: Session, *, with_system: bool) -> list[str]:
    """Names of all groups that some broker has settings of."""
    names: set[str] = set()
    for table in (await _tables(session)).values():
        names |= set(table)
    if not with_system:
        names = {
            one
            for one in names
            if one not in SYSTEM_GROUPS and not one.startswith(SYSTEM_GROUP_PREFIX)
        }
    return own_names(session, sorted(names))


async def _tables(session: Session) -> dict[str, dict[str, Any]]:
    """201: broker -> group -> fields."""
    known = await brokers_of(session)
    places = {name: known.any(name) for name in known.by_name}
    code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
    answers = await call_each(session, places, code, what="listing groups")
    return {
        broker: bodies.load_object(answer.body, "groups").get("subscriptionGroupTable") or {}
        for broker, answer in answers.items()
    }


async def configs(session: Session, name: str) -> dict[str, dict[str, Any]]:
    """The fields of a group by broker, at least one; UnknownName."""
    wire_name = session.wrap(name)
    tables = await _tables(session)
    found = {
        broker: bodies.drop_nulls(table[wire_name])
        for broker, table in tables.items()
        if wire_name in table
    }
    if not found:
        known = sorted({one for table in tables.values() for one in table} - SYSTEM_GROUPS)
        known = [one for one in known if not one.startswith(SYSTEM_GROUP_PREFIX)]
        raise UnknownName("group", name, own_names(session, known))
    return found


async def group(session: Session, name: str) -> dict[str, GroupOnBroker]:
    found: dict[str, GroupOnBroker] = {}
    for broker, fields in (await configs(session, name)).items():
        config = bodies.group_config(fields)
        found[broker] = GroupOnBroker(
            name=name,
            broker=broker,
            consume=config.consumeEnable,
            consume_broadcast=config.consumeBroadcastEnable,
            consume_from_min=config.consumeFromMinEnable,
            orderly=config.consumeMessageOrderly,
            retry_max_times=config.retryMaxTimes,
            retry_queues=config.retryQueueNums,
            consume_timeout_minutes=config.consumeTimeoutMinute,
            attributes=config.attributes,
        )
    return found
