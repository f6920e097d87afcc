"""Files of a lake, wherever Spark can write: a local disk, HDFS, an object store.

Owns: the few file operations that pipelines need besides Spark's own reading and writing. One rule:
they go through Hadoop's FileSystem of the running session, so that every address Spark takes works
here too, with the credentials that it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cometmq.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Files:
    """The file system under `root`, an address as Spark takes it."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        jvm: Any = getattr(spark, "_jvm", None)
        if jvm is None:
            raise UsageError(
                "lakes are written by the driver's own JVM, which a Spark Connect session does not "
                "have: submit the pipeline with spark-submit or run it with a master"
            )
        if not root.strip():
            raise UsageError("the path of a folder (lake, checkpoint) is empty: name one")
        self.root = root.rstrip("/") or "/"
        self._path: Any = jvm.org.apache.hadoop.fs.Path
        context: Any = spark.sparkContext
        configuration = context._jsc.hadoopConfiguration()
        self._system: Any = self._path(self.root).getFileSystem(configuration)
        self._io: Any = jvm.org.apache.hadoop.io.IOUtils
        self._bytes: Any = jvm.java.io.ByteArrayOutputStream

    def at(self, name: str) -> str:
        """The address of something below the root."""
        return f"{self.root}/{name}" if name else self.root

    def exists(self, name: str) -> bool:
        return bool(self._system.exists(self._at(name)))

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder, sorted; nothing if it isn't there."""
        return sorted(str(one.getPath().getName()) for one in self._listed(folder))

    def files_below(self, folder: str, suffix: str) -> dict[str, int]:
        """Files below a folder by their name from the folder on, with their sizes. Folders and
        files that begin with _ or . are left out, as Spark does when it reads. Others may be at
        work there: what goes away meanwhile is found or not, and is no error."""
        found: dict[str, int] = {}
        self._walk(folder, "", suffix, found)
        return dict(sorted(found.items()))

    def _walk(self, folder: str, below: str, suffix: str, found: dict[str, int]) -> None:
        at = f"{folder}/{below}" if folder and below else folder or below
        for one in self._listed(at):
            name = str(one.getPath().getName())
            if name.startswith(("_", ".")):
                continue
            inner = f"{below}/{name}" if below else name
            if one.isDirectory():
                self._walk(folder, inner, suffix, found)
            elif name.endswith(suffix):
                found[inner] = int(one.getLen())

    def _listed(self, folder: str) -> Any:
        """Asked once, without a look before: between the two the folder might go."""
        try:
            return self._system.listStatus(self._at(folder))
        except Exception:  # Hadoop's file systems say in many ways that it isn't there
            if self.exists(folder):
                raise
            return ()

    def make_folder(self, name: str) -> None:
        if not self._system.mkdirs(self._at(name)):
            raise OSError(f"can't make the folder {self.at(name)}")

    def move(self, source: str, target: str) -> None:
        """OSError if it can't be done; nothing is overwritten."""
        if not self._system.rename(self._at(source), self._at(target)):
            raise OSError(f"can't move {self.at(source)} to {self.at(target)}")

    def delete(self, name: str) -> None:
        """A file, or a folder with all in it; what isn't there is deleted already."""
        self._system.delete(self._at(name), True)

    def read(self, name: str) -> bytes:
        stream = self._system.open(self._at(name))
        try:
            out = self._bytes()
            self._io.copyBytes(stream, out, 65536)
            return bytes(out.toByteArray())
        finally:
            stream.close()

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all: written beside, then renamed."""
        beside = f"{name}.part"
        stream = self._system.create(self._at(beside), True)
        try:
            stream.write(bytearray(data))
        finally:
            stream.close()
        self.delete(name)
        self.move(beside, name)

    def claim(self, name: str, data: bytes) -> bool:
        """Make a file that must not be there yet; False if it is."""
        try:
            stream = self._system.create(self._at(name), False)
        except Exception:
            if self.exists(name):
                return False
            raise
        try:
            stream.write(bytearray(data))
        finally:
            stream.close()
        return True

    def _at(self, name: str) -> Any:
        return self._path(self.at(name))


def write_file(spark: SparkSession, path: str, data: bytes) -> None:
    """A file by its whole address."""
    folder, slash, name = path.rpartition("/")
    Files(spark, folder or slash or ".").write(name, data)
