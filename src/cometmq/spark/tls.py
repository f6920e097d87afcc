"""Who we are to the servers: ACL keys and TLS, for source and sink alike.

Owns: those options and what is made of them. One rule: secrets are in no text that this makes:
not in repr, not in an error, not in a plan.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cometmq.client.connection import Credentials
from cometmq.errors import UsageError
from cometmq.spark.options import Option, boolean, secret, text

TLS_OPTIONS = (
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
"""Files are read where they are used: they must be on every executor."""


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
