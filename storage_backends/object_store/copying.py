"""From obstore's memory into the caller's, and the caller's memory lent to obstore.

Both without holding the GIL and without a copy more than that one. Blocking where it says so.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from cacheflow.types import Buffer

__all__ = ["copy_into", "lend"]


class _Exported(ctypes.Structure):
    """CPython's ``Py_buffer``: the only way to the address of read-only memory."""

    _fields_: ClassVar = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_export = ctypes.pythonapi.PyObject_GetBuffer
_export.argtypes = [ctypes.py_object, ctypes.POINTER(_Exported), ctypes.c_int]
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = [ctypes.POINTER(_Exported)]
_release.restype = None


def copy_into(buffer: Buffer, data: object) -> None:
    """Copy ``data`` (anything with the buffer protocol) to the front of ``buffer``; blocking."""
    exported = _Exported()
    _export(data, exported, 0)
    try:
        ctypes.memmove(buffer.address, exported.buf, min(exported.len, buffer.nbytes))
    finally:
        _release(exported)


def lend(buffer: Buffer) -> memoryview:
    """A view of ``buffer`` whose hold is kept as long as anybody has the view.

    obstore reads from it on threads of its own, and a request that has failed may do so for a
    moment after the call has returned: its last reference is the one that counts.
    """
    view = memoryview(buffer.view)  # type: ignore[arg-type]  # host memory: checked before
    buffer.hold.acquire()
    weakref.finalize(view, buffer.hold.release).atexit = False
    return view
