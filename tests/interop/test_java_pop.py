"""The official 5.x push consumer in pop mode, and `mqadmin setConsumeMode` that puts it there.

The program is one source file that java runs as it is: the driver is compiled against 4.9 as well,
whose client knows nothing of this. Apache RocketMQ 5 is the control.
"""

from pathlib import Path

import pytest

from cometmq.client.remote import Remote
from cometmq.wire import fastjson, headers
from cometmq.wire.codes import RequestCode

from .conftest import SIZES
from .driver import Driver
from .jvm import jvm_home, jvm_options
from .processes import Child, tail
from .servers import Launcher, Server, Settings, selected_servers
from .toolchain import Toolchain

pytestmark = pytest.mark.interop

PROGRAM = Path(__file__).parent / "java5" / "Popped.java"
TOPIC, GROUP = "JavaPopped", "java-popped"


def prepare(server: Server) -> None:
    header = headers.CreateTopicHeader(TOPIC, 4, 4, 6, defaultTopic="TBW102")
    with Remote(server.broker, timeout_ms=10_000) as remote:
        remote.call(RequestCode.UPDATE_AND_CREATE_TOPIC, headers.to_ext(header))
        body = fastjson.dumps({"groupName": GROUP})
        remote.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)


@pytest.mark.parametrize("share", ["0", "1"])
@pytest.mark.parametrize("name", ["comet", "apache-5"])
def test_push_consumers_that_pop(
    name: str, share: str, launcher: Launcher, toolchain: Toolchain, tmp_path: Path
) -> None:
    if name not in selected_servers():
        pytest.skip(f"{name} is not in COMETMQ_INTEROP_SERVERS")
    server = launcher.start(name, Settings(tmp_path, tmp_path / "store", sizes=SIZES))
    prepare(server)
    driver = Driver("client-5", server, toolchain, tmp_path)
    (said,) = driver.mqadmin(
        f"setConsumeMode -b {server.broker} -t {TOPIC} -g {GROUP} -m POP -q {share}"
    )
    assert "success" in said.lower(), said
    home = jvm_home(tmp_path / "client-home", "ERROR")
    options = jvm_options(home, toolchain.driver_classpath("client-5"), heap="128m")
    log = tmp_path / "popped.log"
    command = [toolchain.java, "-Drocketmq.client.logUseSlf4j=true", *options, str(PROGRAM)]
    assert Child([*command, server.namesrv, TOPIC, GROUP], log).wait(180) == 0, tail(log)
    facts = dict(line.split("=", 1) for line in log.read_text().splitlines() if "=" in line)
    assert facts["problems"] == "0", tail(log)
    assert facts["seen"] == "200"
    assert facts["once"] == "180"
    assert facts["twice"] == "20"
    assert facts["clients"] == "2"
