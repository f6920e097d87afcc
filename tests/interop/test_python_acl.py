"""Our client against Apache brokers that check every request: 4.9's plain ACL, 5.x's authentication
and authorization. The right key does everything; a wrong secret, no key and a right that is missing
are refused with an error that says so.
"""

import json
import threading
from collections.abc import Iterator

import pytest

from cometmq import Admin, Consumer, Credentials, Message, Producer
from cometmq.client.received import ReceivedMessage
from cometmq.errors import CometError

from .conftest import SIZES
from .servers import Server, Settings, selected_servers, start
from .toolchain import Toolchain

pytestmark = pytest.mark.interop

OWNER = Credentials("interop-owner", "owner-secret-1")
READER = Credentials("interop-reader", "reader-secret-1")
WAIT_S = 60

_PLAIN_ACL = f"""
accounts:
  - accessKey: {OWNER.access_key}
    secretKey: {OWNER.secret_key}
    admin: true
  - accessKey: {READER.access_key}
    secretKey: {READER.secret_key}
    admin: false
    defaultTopicPerm: SUB
    defaultGroupPerm: SUB
"""


def _settings(name: str, settings: Settings) -> Settings:
    """What makes that release check requests."""
    if name == "apache-4":
        conf = settings.folder / f"{name}-home" / "conf"
        conf.mkdir(parents=True)
        (conf / "plain_acl.yml").write_text(_PLAIN_ACL)
        settings.sizes = {**settings.sizes, "aclEnable": "true"}
        return settings
    owner = {"username": OWNER.access_key, "password": OWNER.secret_key}
    inner = {"accessKey": OWNER.access_key, "secretKey": OWNER.secret_key}
    authentication = "org.apache.rocketmq.auth.authentication.provider"
    authorization = "org.apache.rocketmq.auth.authorization.provider"
    settings.sizes = {
        **settings.sizes,
        "authenticationEnabled": "true",
        "authenticationProvider": f"{authentication}.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{authentication}.LocalAuthenticationMetadataProvider",
        "authorizationEnabled": "true",
        "authorizationProvider": f"{authorization}.DefaultAuthorizationProvider",
        "authorizationMetadataProvider": f"{authorization}.LocalAuthorizationMetadataProvider",
        "initAuthenticationUser": json.dumps(owner),
        "innerClientAuthenticationCredentials": json.dumps(inner),
    }
    return settings


@pytest.fixture(scope="module", params=["apache-4", "apache-5"])
def peer(
    request: pytest.FixtureRequest, toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param not in selected_servers():
        pytest.skip(f"{request.param} is not among COMETMQ_INTEROP_SERVERS")
    folder = tmp_path_factory.mktemp(f"acl-{request.param}")
    settings = Settings(folder, folder / "store", sizes=SIZES)
    running = start(request.param, toolchain, _settings(request.param, settings))
    yield running
    running.kill()


def test_the_right_key_does_everything(peer: Server) -> None:
    got: list[ReceivedMessage] = []
    is_there = threading.Event()

    def take(message: ReceivedMessage) -> None:
        got.append(message)
        if len(got) == 3:
            is_there.set()

    with Admin(namesrv=peer.namesrv, credentials=OWNER) as admin:
        admin.create_topic("acl-orders", queues=2)
        with Producer("acl-shop", namesrv=peer.namesrv, credentials=OWNER) as producer:
            sent = [producer.send(Message("acl-orders", b"%d" % n, keys="k1")) for n in range(2)]
            producer.send_batch([Message("acl-orders", b"2")])
        with Consumer("acl-bill", namesrv=peer.namesrv, credentials=OWNER) as consumer:
            consumer.subscribe("acl-orders", "*", take)
            consumer.start()
            assert is_there.wait(WAIT_S), got
        assert sorted(one.body for one in got) == [b"0", b"1", b"2"]
        found = admin.messages_by_key("acl-orders", "k1")
        assert {one.message_id for one in found} == {one.message_id for one in sent}
        by_id = admin.message(sent[0].message_id, "acl-orders")
        assert by_id.body == b"0"
        assert admin.consumer_progress("acl-bill").lag == 0


@pytest.mark.parametrize(
    ("credentials", "reason"),
    [
        (Credentials(OWNER.access_key, "not the secret"), "signature"),
        (Credentials("nobody-1", "owner-secret-1"), "nobody-1|user"),
        (None, "accesskey|username|user"),
    ],
    ids=["wrong secret", "unknown key", "no key"],
)
def test_others_are_refused_and_told_why(
    peer: Server, credentials: Credentials | None, reason: str
) -> None:
    with Admin(namesrv=peer.namesrv, credentials=OWNER) as admin:
        admin.create_topic("acl-refused", queues=1)
    with (
        Producer("acl-stranger", namesrv=peer.namesrv, credentials=credentials) as producer,
        pytest.raises(CometError, match=rf"(?is)({reason})") as refused,
    ):
        producer.send(Message("acl-refused", b"x"))
    assert "owner-secret-1" not in str(refused.value)


def test_a_reader_may_not_write(peer: Server) -> None:
    if peer.name != "apache-4":
        pytest.skip("5.x keeps users in its own tables; its commands for them are not the client's")
    with Admin(namesrv=peer.namesrv, credentials=OWNER) as admin:
        admin.create_topic("acl-read-only", queues=1)
    with (
        Producer("acl-reader", namesrv=peer.namesrv, credentials=READER) as producer,
        pytest.raises(CometError, match=r"(?i)permission|denied|acl-read-only"),
    ):
        producer.send(Message("acl-read-only", b"x"))
