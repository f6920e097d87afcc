"""The official 5.x client's timed messages and recall, against CometMQ and against RocketMQ 5.

The program is one source file that java runs as it is: the driver is compiled against 4.9 as well,
whose client knows nothing of this.
"""

from pathlib import Path

import pytest

from .conftest import SIZES
from .jvm import jvm_home, jvm_options
from .processes import Child, tail
from .servers import Launcher, Settings, selected_servers
from .toolchain import Toolchain

pytestmark = pytest.mark.interop

PROGRAM = Path(__file__).parent / "java5" / "Timed.java"
PATIENCE_MS = 4_000  # of a consumer, beyond the second of precision, on a busy machine


@pytest.mark.parametrize("name", ["comet", "apache-5"])
def test_timed_messages(
    name: str, launcher: Launcher, toolchain: Toolchain, tmp_path: Path
) -> None:
    if name not in selected_servers():
        pytest.skip(f"{name} is not in COMETMQ_INTEROP_SERVERS")
    sizes = SIZES | {"recallMessageEnable": "true"}
    server = launcher.start(name, Settings(tmp_path, tmp_path / "store", sizes=sizes))
    home = jvm_home(tmp_path / "client-home", "ERROR")
    options = jvm_options(home, toolchain.driver_classpath("client-5"), heap="128m")
    log = tmp_path / "timed.log"
    command = [toolchain.java, "-Drocketmq.client.logUseSlf4j=true", *options, str(PROGRAM)]
    assert Child([*command, server.namesrv], log).wait(120) == 0, tail(log)
    facts = dict(line.split("=", 1) for line in log.read_text().splitlines() if "=" in line)
    assert facts["recalled"] == "true"
    assert facts["far"] == "13"
    late = dict(one.split(":") for one in facts["late"].split(","))
    assert sorted(late) == ["at", "millis", "seconds"]
    for body, ms in late.items():
        assert -1000 <= int(ms) <= 1000 + PATIENCE_MS, (body, ms)
        assert name != "comet" or int(ms) >= 0, "CometMQ is never early"
