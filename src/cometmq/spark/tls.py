"""Who we are to the servers: ACL keys and TLS, for source and sink alike.

Owns: those options, the file that may hold them, and what is made of them. One rule: secrets are in
no text that this makes: not in repr, not in an error, not in a plan.

A file (`accessFile`) has an option a line, and is read by the driver; RocketMQ's own tools.yml with
keys in it is such a file too:

    # of the shop's cluster
    accessKey = reader
    secretKey = "12345678"
    tls = true
    tlsCaFile = /etc/shop/ca.pem
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cometmq.client.connection import Credentials
from cometmq.errors import UsageError
from cometmq.spark.options import Option, boolean, parse, secret, text

ACCESS_FILE = "accessFile"
MOST_FILE_BYTES = 64 * 1024
IN_A_FILE = (
    Option("accessKey", secret, None, "ACL: the access key", is_secret=True),
    Option("secretKey", secret, None, "ACL: signs every request", is_secret=True),
    Option("securityToken", secret, None, "ACL: of temporary keys", is_secret=True),
    Option("tls", boolean, False, "talk to name servers and brokers over TLS"),
    Option("tlsCaFile", text, None, "PEM of the authorities to trust; else the system's"),
    Option("tlsCertFile", text, None, "PEM of this client's certificate"),
    Option("tlsKeyFile", text, None, "PEM of its private key"),
    Option("tlsKeyPassword", secret, None, "of that key", is_secret=True),
    Option("tlsVerify", boolean, True, "false: believe any server (for tests)"),
)
"""Files that these name are read where they are used: they must be on every executor."""
TLS_OPTIONS = (
    Option(ACCESS_FILE, text, None, "a file of the driver's that holds the options below"),
    *IN_A_FILE,
)


def with_access_file(options: Mapping[str, str]) -> dict[str, str]:
    """Options with those of the file that they name, if they name one."""
    found = {key: str(value) for key, value in options.items()}
    named = [key for key in found if key.lower() == ACCESS_FILE.lower()]
    for key in named:
        path = found[key]
        given = {name.lower() for name in found}
        for name, value in read_access_file(path).items():
            if name.lower() in given:
                raise UsageError(f"{name} is given twice: as an option and in {path}")
            found[name] = value
    return found


def read_access_file(path: str) -> dict[str, str]:
    """The options in a file, checked; UsageError names the line, and never shows what is in it."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MOST_FILE_BYTES + 1)
        lines = raw.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise UsageError(f"{ACCESS_FILE} {path!r} can't be read: {why}") from None
    if len(raw) > MOST_FILE_BYTES:
        raise UsageError(f"{ACCESS_FILE} {path!r} is larger than {MOST_FILE_BYTES} bytes")
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.strip()
        if not words or words.startswith(("#", "---")):
            continue
        ends = [at for at in (words.find("="), words.find(":")) if at > 0]
        if not ends:
            raise UsageError(f"{path}:{number}: write a line as name = value")
        name, value = words[: min(ends)].strip(), words[min(ends) + 1 :].strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        if name.lower() in {one.lower() for one in found}:
            raise UsageError(f"{path}:{number}: {name} is there twice")
        found[name] = value
    parse(IN_A_FILE, found, what=f"the file {path}")
    return found


@dataclass(frozen=True)
class Access:
    """Keys and TLS settings; picklable, hashable, silent."""

    access_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)
    security_token: str = field(default="", repr=False)
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    key_password: str = field(default="", repr=False)
    verify: bool = True

    def credentials(self) -> Credentials | None:
        if not self.access_key:
            return None
        return Credentials(self.access_key, self.secret_key, self.security_token)

    def context(self) -> ssl.SSLContext | None:
        """For our client and for our sockets; None without TLS."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"tlsCaFile {self.ca_file!r} can't be used: {error}") from None
        if self.cert_file:
            try:
                context.load_cert_chain(
                    self.cert_file, self.key_file or None, self.key_password or None
                )
            except (OSError, ssl.SSLError) as error:
                raise UsageError(
                    f"tlsCertFile {self.cert_file!r} and its key can't be used: {error}"
                ) from None
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def client_keywords(self) -> dict[str, Any]:
        """For any client of ours: `Producer(group, namesrv=..., **access.client_keywords())`."""
        return {"credentials": self.credentials(), "tls": self.context() or False}


def access_of(values: Mapping[str, Any]) -> Access:
    """From parsed options that have TLS_OPTIONS in their table."""
    if (values["accessKey"] is None) != (values["secretKey"] is None):
        raise UsageError("accessKey and secretKey go together: one of them is missing")
    if values["securityToken"] is not None and values["accessKey"] is None:
        raise UsageError("securityToken goes with accessKey and secretKey")
    if not values["tls"]:
        for name in ("tlsCaFile", "tlsCertFile", "tlsKeyFile", "tlsKeyPassword"):
            if values[name] is not None:
                raise UsageError(f"{name} is given without tls=true")
    if values["tlsKeyFile"] is not None and values["tlsCertFile"] is None:
        raise UsageError("tlsKeyFile is given without tlsCertFile")
    return Access(
        access_key=values["accessKey"] or "",
        secret_key=values["secretKey"] or "",
        security_token=values["securityToken"] or "",
        tls=values["tls"],
        ca_file=values["tlsCaFile"] or "",
        cert_file=values["tlsCertFile"] or "",
        key_file=values["tlsKeyFile"] or "",
        key_password=values["tlsKeyPassword"] or "",
        verify=values["tlsVerify"],
    )
