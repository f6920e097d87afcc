"""Mapping: a file in memory that keeps no descriptor.

Owns: one mmap(2). Python's own mmap keeps a copy of the descriptor before 3.13, and tens of thousands
of mapped queue files would spend the limit of open files. One rule: as with mmap.mmap, memory that
somebody has a view of is never unmapped: close() raises BufferError.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_SetFromErrno


cdef extern from "<sys/mman.h>" nogil:
    int PROT_READ
    int PROT_WRITE
    int MAP_SHARED
    void* MAP_FAILED
    void* mmap(void* address, size_t size, int protection, int flags, int fd, long offset)
    int munmap(void* address, size_t size)
    int c_madvise "madvise"(void* address, size_t size, int advice)


cdef class Mapping:
    """The first `size` bytes of a file, for reading and writing; `fd` may be closed right after."""

    cdef void* at
    cdef Py_ssize_t size
    cdef Py_ssize_t exports

    def __cinit__(self, int fd, Py_ssize_t size):
        cdef void* found
        self.at = NULL
        self.exports = 0
        if size <= 0:
            raise ValueError(f"size is {size}, must be above 0")
        found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
        if found == MAP_FAILED:
            PyErr_SetFromErrno(OSError)
        self.at = found
        self.size = size

    def __dealloc__(self):
        if self.at != NULL:
            munmap(self.at, self.size)

    def __len__(self):
        return self.size if self.at != NULL else 0

    def __getbuffer__(self, Py_buffer* view, int flags):
        if self.at == NULL:
            raise ValueError("the mapping is closed")
        PyBuffer_FillInfo(view, self, self.at, self.size, 0, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* view):
        self.exports -= 1

    def madvise(self, int advice):
        """How the memory will be used, one of mmap.MADV_..."""
        if self.at == NULL:
            raise ValueError("the mapping is closed")
        if c_madvise(self.at, self.size, advice) != 0:
            PyErr_SetFromErrno(OSError)

    def close(self):
        """Unmap; BufferError while somebody has a view of it."""
        if self.exports > 0:
            raise BufferError(f"the mapping has {self.exports} views")
        if self.at != NULL:
            munmap(self.at, self.size)
            self.at = NULL
