"""Runs the Java side: one scenario of our driver, or one command of mqadmin."""

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .jvm import jvm_home, jvm_options
from .processes import Child, ProcessError, tail
from .servers import Server
from .toolchain import Toolchain

SCENARIO_LIMIT_S = 150
MQADMIN_LIMIT_S = 60
# Most of an mqadmin run of 5.x is waiting for its own threads to end.
MQADMIN_AT_ONCE = 4
# The JVM's own time to start and stop, on top of the scenario's limit.
GRACE_S = 20
_STACK_TRACE = re.compile(r"^\s+at [\w.$]+\(|Exception[: ]", re.MULTILINE)


@dataclass
class Driver:
    """The Java programs of one client release, aimed at one server."""

    client: str
    server: Server
    toolchain: Toolchain
    folder: Path
    _numbers = itertools.count(1)

    def scenario(
        self, name: str, *, jvm: tuple[str, ...] = (), topic: str = "", **options: object
    ) -> dict[str, Any]:
        """Play one scenario; its facts. Raises when a check in it failed."""
        number = next(self._numbers)
        log = self.folder / f"{number:03d}-{name}.log"
        words = {"namesrv": self.server.namesrv, "broker": self.server.broker}
        words |= {"topic": topic or f"T{number}_{name}", "group": f"G{number}_{name}"}
        words |= {"limit": str(SCENARIO_LIMIT_S)}
        words |= {name.replace("_", "-"): str(value) for name, value in options.items()}
        arguments = [text for key, value in words.items() for text in (f"--{key}", value)]
        command = [*self._java(*jvm), "interop.Scenario", name, *arguments]
        status = Child(command, log).wait(SCENARIO_LIMIT_S + GRACE_S)
        result = _last_json(log)
        if status != 0 or result is None or not result["ok"]:
            reason = result["error"] if result else f"exit status {status}"
            raise ProcessError(f"scenario {name}: {reason}\n{tail(log)}")
        return result

    def mqadmin(self, *commands: str) -> list[str]:
        """Run mqadmin commands side by side; what each printed, in the order asked."""
        running: list[Child] = []
        outputs: list[str] = []
        for number, command in enumerate(commands):
            if number >= MQADMIN_AT_ONCE:
                outputs.append(_printed(running[number - MQADMIN_AT_ONCE]))
            running.append(self._start_mqadmin(command))
        return outputs + [_printed(child) for child in running[len(outputs) :]]

    def _start_mqadmin(self, command: str) -> Child:
        words = command.split()
        log = self.folder / f"{next(self._numbers):03d}-mqadmin-{words[0]}.log"
        java = [*self._java(), "org.apache.rocketmq.tools.command.MQAdminStartup"]
        return Child([*java, *words, "-n", self.server.namesrv], log)

    def _java(self, *extra: str) -> list[str]:
        home = jvm_home(self.folder / f"{self.client}-home", "ERROR")
        options = jvm_options(home, self.toolchain.driver_classpath(self.client), heap="64m")
        return [self.toolchain.java, "-Drocketmq.client.logUseSlf4j=true", *extra, *options]


def fail_on_stack_trace(printed: str) -> None:
    """mqadmin prints an exception and exits 0 all the same."""
    if _STACK_TRACE.search(printed):
        raise ProcessError(f"mqadmin printed an exception:\n{printed}")


def _printed(mqadmin: Child) -> str:
    mqadmin.wait(MQADMIN_LIMIT_S)
    return mqadmin.log.read_text(errors="replace")


def _last_json(log: Path) -> dict[str, Any] | None:
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if line.startswith('{"ok"'):
            result: dict[str, Any] = json.loads(line)
            return result
    return None
