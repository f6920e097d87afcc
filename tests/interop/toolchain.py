"""Java and the jars: finds java and mvn, and builds every classpath once into `.cache/interop`.

A machine without java, mvn or Maven Central gets one `Unavailable` with the reason, after one
bounded attempt; a driver that does not compile is an error, not a reason to skip.
"""

import fcntl
import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .versions import APACHE_SERVERS, CLIENTS

HERE = Path(__file__).resolve().parent
JAVA_PROJECT = HERE / "java"
CACHE = HERE.parents[1] / ".cache" / "interop"
# A first download takes about half a minute per classpath on a good line.
BUILD_TIMEOUT_S = 300
MAVEN_TIMEOUTS = (
    "-Dmaven.wagon.http.connectionTimeout=10000",
    "-Dmaven.wagon.http.readTimeout=30000",
    "-Dmaven.wagon.http.retryHandler.count=1",
)


class Unavailable(Exception):
    """The machine cannot run the suite; the text says why."""


@dataclass(frozen=True)
class Toolchain:
    """Paths of java and of the directories with compiled classes and jars."""

    java: str
    drivers: dict[str, Path]
    servers: dict[str, Path]

    def driver_classpath(self, client: str) -> str:
        """Our scenarios plus the client and mqadmin of one release."""
        home = self.drivers[client]
        return f"{home / 'classes'}:{home / 'lib'}/*"

    def server_classpath(self, server: str) -> str:
        """Apache's name server and broker of one release."""
        return f"{self.servers[server] / 'lib'}/*"


def prepare() -> Toolchain:
    """Build what is not built yet; raise Unavailable when this machine cannot."""
    java, mvn = shutil.which("java"), shutil.which("mvn")
    if java is None:
        raise Unavailable("java is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        drivers = {
            client: _build(mvn, "pom.xml", CACHE / f"driver-{version}", version)
            for client, version in CLIENTS.items()
        }
        servers = {
            server: _build(mvn, "server.pom.xml", CACHE / f"server-{version}", version)
            for server, version in APACHE_SERVERS.items()
        }
    return Toolchain(java, drivers, servers)


def _build(mvn: str | None, pom: str, home: Path, version: str) -> Path:
    stamp = home / "built-from"
    fingerprint = _fingerprint(pom)
    if stamp.exists() and stamp.read_text() == fingerprint:
        return home
    if mvn is None:
        raise Unavailable("mvn is not installed and the jars are not cached")
    command = [mvn, "-q", "-B", "-Dstyle.color=never", "-f", str(JAVA_PROJECT / pom)]
    command += MAVEN_TIMEOUTS
    command += [f"-Drocketmq.version={version}", f"-Dinterop.build={home}"]
    command += ["compile", "dependency:copy-dependencies"]
    try:
        built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"mvn was not done with {home.name} in {BUILD_TIMEOUT_S} s") from None
    if "COMPILATION ERROR" in built.stdout:
        raise RuntimeError(f"the driver does not compile against {version}:\n{built.stdout}")
    if built.returncode != 0:
        reason = next((line for line in built.stdout.splitlines() if "ERROR" in line), "no output")
        raise Unavailable(f"mvn cannot get the jars of {home.name}: {reason[:300]}")
    stamp.write_text(fingerprint)
    return home


def _fingerprint(pom: str) -> str:
    """Changes when the pom changes, and for the driver's pom when a source does."""
    files = [JAVA_PROJECT / pom]
    if pom == "pom.xml":
        files += sorted((JAVA_PROJECT / "src").rglob("*.java"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
