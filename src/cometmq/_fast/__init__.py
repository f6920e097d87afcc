"""The compiled path: the hot five percent, in typed Cython. Present where it could be built.

Owns: whether it is there. One rule: nothing of ours is imported here, and everything works without.
"""

from __future__ import annotations

from types import ModuleType


def load() -> tuple[ModuleType | None, str]:
    """The compiled module, or None, and why it is not there."""
    try:
        from cometmq._fast import hot
    except ImportError as error:
        return None, f"cometmq was installed without a C compiler ({error})"
    return hot, ""
