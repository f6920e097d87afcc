"""THE TABLE of the name server: request code -> how its header is read and what is done.

Owns: every request's handler. Start reading here. One rule: a handler reads the header, asks the
state (Routes, Registrations, Settings) and shapes the answer; rules are kept where the state is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cometmq import config as configs
from cometmq.errors import BodyError, ConfigError, RequestRefused
from cometmq.nameserver.names import MAX_INT, check_topic, refuse
from cometmq.nameserver.routes import Queues
from cometmq.nameserver.settings import ORDER_TOPICS
from cometmq.requests import Call, Entry, Reply
from cometmq.wire import bodies, fastjson, headers
from cometmq.wire.codes import RequestCode, ResponseCode, Version
from cometmq.wire.hashing import body_crc

if TYPE_CHECKING:
    from cometmq.nameserver.nameserver import NameServer

ZONE_NAME = "__ZONE_NAME"
ZONE_MODE = "__ZONE_MODE"


# -------------------------------------------------------------------------------------- brokers


def register_broker(server: NameServer, call: Call) -> Reply | None:
    header: headers.RegisterBrokerHeader = call.header
    body = call.frame.body
    if header.bodyCrc32 and body_crc(body) != header.bodyCrc32:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, "crc32 not match: the body was damaged")
    registered = bodies.registration(body, call.frame.version)
    # The request may wait, its megabytes of body need not.
    call.frame = msgspec.structs.replace(call.frame, body=b"")
    zone = call.frame.ext.get(ZONE_NAME) or None
    work = server.registrations.begin(call, registered, zone, server.config)
    if work is None:
        return Reply(body=server.order_topics())
    if work.is_done:
        server.finish(work, call.out)
    return None


def unregister_broker(server: NameServer, call: Call) -> Reply:
    header: headers.BrokerIdentityHeader = call.header
    key = (header.clusterName, header.brokerAddr)
    member = server.routes.members.get(key)
    if member is not None and member.name == header.brokerName:
        server.stats.brokers_unregistered += 1
        server.registrations.leave([key], "it unregistered", call.out)
    return Reply()


def query_data_version(server: NameServer, call: Call) -> Reply:
    header: headers.BrokerIdentityHeader = call.header
    asked = bodies.data_version(fastjson.loads(call.frame.body) if call.frame.body else None)
    member = server.routes.members.get((header.clusterName, header.brokerAddr))
    stored = None
    if member is not None:
        member.seen_ms = call.now_ms
        stored = member.version
    return Reply(
        ext=headers.to_ext(headers.DataVersionResponse(changed=stored != asked)),
        body=msgspec.json.encode(stored) if stored is not None else b"",
    )


def broker_heartbeat(server: NameServer, call: Call) -> Reply:
    header: headers.BrokerHeartbeatHeader = call.header
    member = server.routes.members.get((header.clusterName, header.brokerAddr))
    if member is not None:
        member.seen_ms = call.now_ms
    return Reply()


def member_group(server: NameServer, call: Call) -> Reply:
    header: headers.MemberGroupHeader = call.header
    broker = server.routes.brokers.get(header.brokerName)
    group = {
        "brokerAddrs": dict(sorted(broker.addresses.items())) if broker is not None else {},
        "brokerName": header.brokerName,
        "cluster": header.clusterName,
    }
    return Reply(body=fastjson.dumps({"brokerMemberGroup": group}))


def cluster_info(server: NameServer, call: Call) -> Reply:
    return Reply(body=fastjson.dumps(server.routes.cluster_view()))


def wipe_write(server: NameServer, call: Call) -> Reply:
    header: headers.BrokerNameHeader = call.header
    count = server.routes.wipe_write(header.brokerName)
    return Reply(ext=headers.to_ext(headers.WipedResponse(wipeTopicCount=count)))


def add_write(server: NameServer, call: Call) -> Reply:
    header: headers.BrokerNameHeader = call.header
    count = server.routes.add_write(header.brokerName)
    return Reply(ext=headers.to_ext(headers.AddedResponse(addTopicCount=count)))


# --------------------------------------------------------------------------------------- topics


def route(server: NameServer, call: Call) -> Reply:
    header: headers.RouteHeader = call.header
    ext = call.frame.ext
    zone = None
    if ext.get(ZONE_MODE, "").lower() == "true":
        zone = ext.get(ZONE_NAME, "").strip() or None
    found = server.routes.route(header.topic, zone)
    if found is None:
        server.stats.routes_missing += 1
        raise RequestRefused(ResponseCode.TOPIC_NOT_EXIST, _why_missing(server, header.topic))
    server.stats.routes_found += 1
    if server.config.is_order_topic_enabled:
        order = server.settings.get(ORDER_TOPICS, header.topic)
        if order is not None:
            found["orderTopicConf"] = order
            found = {name: found[name] for name in sorted(found)}
    is_standard = call.frame.version >= Version.V4_9_4 or header.acceptStandardJsonOnly
    return Reply(body=fastjson.dumps(found, bare_int_keys=True, standard=is_standard))


def _why_missing(server: NameServer, topic: str) -> str:
    what = f"No topic route info in name server for the topic: {topic[:255]}. "
    count = len(server.routes.brokers)
    if not count:
        return what + (
            "No broker is registered here: check that one runs and that its namesrvAddr "
            "names this name server"
        )
    known = "1 broker" if count == 1 else f"{count} brokers"
    if server.registrations.slices:
        known += ", one of which is still telling its topics"
    return what + (
        f"This name server knows {known}, and the topic is registered by none of them: create it "
        "(mqadmin updateTopic), or set autoCreateTopicEnable=true on a broker"
    )


def delete_topic(server: NameServer, call: Call) -> Reply:
    header: headers.TopicInNameServerHeader = call.header
    server.routes.delete_topic(header.topic, header.clusterName or None)
    return Reply()


def register_topic(server: NameServer, call: Call) -> Reply:
    """All of the given brokers or none: unlike RocketMQ, an unknown one is told, not ignored."""
    header: headers.TopicInNameServerHeader = call.header
    check_topic(header.topic)
    rows = bodies.load_object(call.frame.body, "topic route").get("queueDatas") or []
    if not isinstance(rows, list):
        raise BodyError("topic route: queueDatas is not a list")
    wanted = [_queues(row) for row in rows]
    for queues in wanted:
        if queues.broker not in server.routes.brokers:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"broker {queues.broker[:255]!r} is not registered here; register it first",
            )
    server.registrations.check_topic_room([header.topic] if wanted else [], server.config)
    for queues in wanted:
        server.routes.put_queues(header.topic, server.routes.brokers[queues.broker], queues)
    return Reply()


class _QueueRow(msgspec.Struct):
    brokerName: str  # noqa: N815 - the wire's name
    readQueueNums: int = 16  # noqa: N815
    writeQueueNums: int = 16  # noqa: N815
    perm: int = 6
    topicSysFlag: int = 0  # noqa: N815


def _queues(raw: object) -> Queues:
    row = bodies.convert(bodies.drop_nulls(raw), _QueueRow, "queueDatas")
    numbers = (row.readQueueNums, row.writeQueueNums, row.perm, row.topicSysFlag)
    if not all(0 <= number <= MAX_INT for number in numbers):
        raise refuse(f"queueDatas of broker {row.brokerName[:80]!r} has a number out of range")
    return Queues(row.brokerName, *numbers)


# -------------------------------------------------------------------------------- lists of topics


def all_topics(server: NameServer, call: Call) -> Reply:
    if not server.config.is_all_topic_list_enabled:
        raise _disabled("enableAllTopicList")
    return _topic_list(list(server.routes.topics))


def cluster_topics(server: NameServer, call: Call) -> Reply:
    header: headers.ClusterHeader = call.header
    _check_lists(server)
    return _topic_list(server.routes.topics_of_cluster(header.cluster))


def system_topics(server: NameServer, call: Call) -> Reply:
    """Names of clusters and brokers, and a broker that knows the rest."""
    _check_lists(server)
    names: dict[str, None] = {}
    for cluster, brokers in server.routes.clusters.items():
        names[cluster] = None
        names.update(brokers)
    first = next(iter(server.routes.brokers.values()), None)
    address = first.addresses[min(first.addresses)] if first is not None else None
    return _topic_list(list(names), address)


def unit_topics(server: NameServer, call: Call) -> Reply:
    _check_lists(server)
    return _topic_list(server.routes.topics_by_flag(unit=True, sub=None))


def unit_sub_topics(server: NameServer, call: Call) -> Reply:
    _check_lists(server)
    return _topic_list(server.routes.topics_by_flag(unit=None, sub=True))


def unit_sub_ununit_topics(server: NameServer, call: Call) -> Reply:
    _check_lists(server)
    return _topic_list(server.routes.topics_by_flag(unit=False, sub=True))


def _check_lists(server: NameServer) -> None:
    if not server.config.is_topic_list_enabled:
        raise _disabled("enableTopicList")


def _disabled(key: str) -> RequestRefused:
    return RequestRefused(
        ResponseCode.SYSTEM_ERROR, f"disable: {key}=false on this name server forbids this list"
    )


def _topic_list(topics: list[str], address: str | None = None) -> Reply:
    body: dict[str, object] = {} if address is None else {"brokerAddr": address}
    body["topicList"] = topics
    return Reply(body=msgspec.json.encode(body))


# ------------------------------------------------------------------------------------- settings


def put_kv(server: NameServer, call: Call) -> Reply | None:
    header: headers.PutKVHeader = call.header
    return server.settings.put(call, header.namespace, header.key, header.value)


def get_kv(server: NameServer, call: Call) -> Reply:
    header: headers.KVHeader = call.header
    value = server.settings.get(header.namespace, header.key)
    if value is None:
        raise RequestRefused(
            ResponseCode.QUERY_NOT_FOUND,
            f"No config item, Namespace: {header.namespace[:255]} Key: {header.key[:255]}",
        )
    return Reply(ext=headers.to_ext(headers.KVResponse(value=value)))


def delete_kv(server: NameServer, call: Call) -> Reply | None:
    header: headers.KVHeader = call.header
    return server.settings.delete(call, header.namespace, header.key)


def list_kv(server: NameServer, call: Call) -> Reply:
    header: headers.NamespaceHeader = call.header
    body = server.settings.listing(header.namespace)
    if body is None:
        raise RequestRefused(
            ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {header.namespace[:255]}"
        )
    return Reply(body=body)


def get_config(server: NameServer, call: Call) -> Reply:
    lines = [f"{key}={value}\n" for key, value in configs.to_settings(server.config).items()]
    return Reply(body="".join(lines).encode())


def update_config(server: NameServer, call: Call) -> Reply:
    """Only keys marked live in the table of settings; one that isn't refuses them all."""
    wanted = bodies.parse_properties_text(call.frame.body)
    live = {row.name for row in configs.NAMESERVER_KEYS if row.is_live}
    for key in wanted:
        if key not in live:
            raise RequestRefused(
                ResponseCode.NO_PERMISSION,
                f"{key[:80]!r} can't be changed while the name server runs; these can: "
                + ", ".join(sorted(live)),
            )
    try:
        server.config = configs.apply(
            server.config, wanted, source="UPDATE_NAMESRV_CONFIG", live_only=True
        )
    except ConfigError as error:
        raise refuse(str(error)) from None
    return Reply()


TABLE: dict[int, Entry[NameServer]] = {
    RequestCode.PUT_KV_CONFIG: Entry(put_kv, headers.PutKVHeader),
    RequestCode.GET_KV_CONFIG: Entry(get_kv, headers.KVHeader),
    RequestCode.DELETE_KV_CONFIG: Entry(delete_kv, headers.KVHeader),
    RequestCode.GET_KVLIST_BY_NAMESPACE: Entry(list_kv, headers.NamespaceHeader),
    RequestCode.REGISTER_BROKER: Entry(register_broker, headers.RegisterBrokerHeader),
    RequestCode.UNREGISTER_BROKER: Entry(unregister_broker, headers.BrokerIdentityHeader),
    RequestCode.QUERY_DATA_VERSION: Entry(query_data_version, headers.BrokerIdentityHeader),
    RequestCode.BROKER_HEARTBEAT: Entry(broker_heartbeat, headers.BrokerHeartbeatHeader),
    RequestCode.GET_BROKER_MEMBER_GROUP: Entry(member_group, headers.MemberGroupHeader),
    RequestCode.GET_BROKER_CLUSTER_INFO: Entry(cluster_info),
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: Entry(wipe_write, headers.BrokerNameHeader),
    RequestCode.ADD_WRITE_PERM_OF_BROKER: Entry(add_write, headers.BrokerNameHeader),
    RequestCode.GET_ROUTEINFO_BY_TOPIC: Entry(route, headers.RouteHeader),
    RequestCode.DELETE_TOPIC_IN_NAMESRV: Entry(delete_topic, headers.TopicInNameServerHeader),
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: Entry(register_topic, headers.TopicInNameServerHeader),
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: Entry(all_topics),
    RequestCode.GET_TOPICS_BY_CLUSTER: Entry(cluster_topics, headers.ClusterHeader),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: Entry(system_topics),
    RequestCode.GET_UNIT_TOPIC_LIST: Entry(unit_topics),
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: Entry(unit_sub_topics),
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: Entry(unit_sub_ununit_topics),
    RequestCode.UPDATE_NAMESRV_CONFIG: Entry(update_config),
    RequestCode.GET_NAMESRV_CONFIG: Entry(get_config),
}
