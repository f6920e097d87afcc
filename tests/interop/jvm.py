"""How every JVM of the suite is started: small, quiet, and at home in a temporary directory.

JDK 17 hides what RocketMQ 4.x reaches into, hence the opens: without them a 4.9 broker dies
in its shutdown hook and leaves the store as if it had crashed. The perf data file that a JVM keeps
in the system's temporary directory is switched off, so that nothing stays behind.
"""

from pathlib import Path

OPENS = ("java.base/java.nio", "java.base/sun.nio.ch", "java.base/jdk.internal.ref")

_LOGBACK = """<configuration>
  <appender name="out" class="{package}ch.qos.logback.core.ConsoleAppender">
    <target>System.err</target>
    <encoder><pattern>%d{{HH:mm:ss.SSS}} %level %logger{{0}} %msg%n</pattern></encoder>
  </appender>
  <logger name="RocketmqRemoting" level="ERROR"/>
  <logger name="RocketmqWaterMark" level="ERROR"/>
  <logger name="RocketmqPop" level="ERROR"/>
  <root level="{level}"><appender-ref ref="out"/></root>
</configuration>
"""
_SHADED = "org.apache.rocketmq.logging."


def jvm_home(path: Path, level: str) -> Path:
    """A user home and RocketMQ home, with log settings for both releases.

    4.x servers and tools read theirs by path, the 4.x client and all of 5.x from the classpath.
    """
    conf = path / "conf"
    conf.mkdir(parents=True, exist_ok=True)
    (path / "tmp").mkdir(exist_ok=True)
    for name in ("logback", "logback_namesrv", "logback_broker", "logback_tools"):
        (conf / f"{name}.xml").write_text(_LOGBACK.format(package="", level=level))
    (conf / "rmq.logback.xml").write_text(_LOGBACK.format(package=_SHADED, level=level))
    return path


def jvm_options(home: Path, classpath: str, heap: str = "256m") -> list[str]:
    """Options for a JVM that starts fast and writes nowhere but under `home`."""
    options = [f"-Xms{heap}", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    options += ["-XX:-UsePerfData", f"-Duser.home={home}", f"-Djava.io.tmpdir={home / 'tmp'}"]
    options += [f"-Drocketmq.home.dir={home}", f"-XX:ErrorFile={home / 'hs_err.log'}"]
    for package in OPENS:
        options += ["--add-opens", f"{package}=ALL-UNNAMED"]
    return [*options, "-cp", f"{home / 'conf'}:{classpath}"]
