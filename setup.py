"""Compiles src/cometmq/_fast where there is a compiler; everything else is in pyproject.toml.

One rule: the package installs and works without it. A compiler that is missing or fails leaves a
warning, and the server says at start that it runs the plain path.
"""

from __future__ import annotations

import os
import sys

from setuptools import Extension, setup

# Wrapping arithmetic is what Java's hash needs, and what the parser's checks rely on.
FLAGS = ["-O3", "-fwrapv", "-fno-strict-aliasing"]


def extensions() -> list[Extension]:
    if os.environ.get("COMETMQ_PLAIN"):
        print("COMETMQ_PLAIN is set: not compiling cometmq._fast", file=sys.stderr)
        return []
    try:
        from Cython.Build import cythonize
    except ImportError:
        print("no Cython: not compiling cometmq._fast", file=sys.stderr)
        return []
    modules = [
        Extension(
            f"cometmq._fast.{name}",
            [f"src/cometmq/_fast/{name}.pyx"],
            extra_compile_args=FLAGS + os.environ.get("COMETMQ_FAST_FLAGS", "").split(),
            extra_link_args=os.environ.get("COMETMQ_FAST_LINK", "").split(),
        )
        for name in ("hot", "mapping", "walk")
    ]
    found = cythonize(
        modules,
        build_dir=os.environ.get("COMETMQ_FAST_BUILD", "build/cython"),
        include_path=["src"],
        compiler_directives={"language_level": "3"},
        force=bool(os.environ.get("COMETMQ_FAST_FLAGS")),
    )
    for extension in found:
        extension.optional = True  # cythonize makes new ones and forgets it
    return list(found)


setup(ext_modules=extensions())
