"""The RocketMQ releases this suite runs: the one place where they are pinned.

Maven Central carries the 4.x client and mqadmin up to 4.9.8 but the 4.x name server and broker
only up to 4.9.7, so the 4.x control is a 4.9.7 server with a 4.9.8 client. 5.5.0 is the newest
release of which client, tools, name server and broker are all published.
"""

CLIENTS: dict[str, str] = {"client-4": "4.9.8", "client-5": "5.5.0"}
APACHE_SERVERS: dict[str, str] = {"apache-4": "4.9.7", "apache-5": "5.5.0"}

# Each server with the clients that are driven against it. Apache is the control: a test that fails
# there is wrong. CometMQ must serve both generations.
PAIRS: tuple[tuple[str, str], ...] = (
    ("comet", "client-4"),
    ("comet", "client-5"),
    ("apache-4", "client-4"),
    ("apache-5", "client-5"),
)
