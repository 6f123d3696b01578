"""Host memory as the kernel gives it: page-aligned, pinned where CUDA is in use.

Knows nothing of leases; whoever frees it has made sure that no I/O touches it any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError
from cacheflow.memory.hold import InFlight
from cacheflow.types import Buffer, MemoryKind

if TYPE_CHECKING:
    from cacheflow.types import Hold

__all__ = ["HostPages", "buffer_from"]

_HUGE_PAGE: Final = 2 << 20
_MAP_HUGETLB: Final = 0x40000
"""Linux's flag, which Python's mmap does not name."""


def buffer_from(
    data: bytes | bytearray | memoryview | mmap.mmap, hold: Hold | None = None
) -> Buffer:
    """A pageable :class:`Buffer` over caller-owned memory (bytes are copied, to be addressable)."""
    view = memoryview(bytearray(data) if isinstance(data, bytes) else data).cast("B")
    array = (ctypes.c_char * len(view)).from_buffer(view)
    return Buffer(ctypes.addressof(array), len(view), MemoryKind.PAGEABLE, view, hold or InFlight())


class HostPages:
    """``nbytes`` of anonymous memory, touched (and so taken) only as it is used.

    ``huge``: in huge pages, reserved ones where there are enough (``pages`` is then ``hugetlb``),
    else whatever the kernel makes of the wish (``advised``).

    Raises:
        ConfigError: there is not so much memory, or ``pin`` is True and it cannot be pinned (None:
            pinned if possible).
    """

    __slots__ = ("_map", "address", "kind", "pages", "view")

    def __init__(self, nbytes: int, *, pin: bool | None, huge: bool = False) -> None:
        try:
            made = _map_huge(nbytes) if huge else (mmap.mmap(-1, nbytes), "normal")
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot have {nbytes} bytes of memory: ask for less") from error
        self._map, self.pages = made
        self.view = memoryview(self._map)[:nbytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        pinned = pin is not False and _pin(self.address, nbytes)
        if pin and not pinned:
            raise ConfigError(
                f"cannot pin {nbytes} bytes: that needs torch with a CUDA device, imported before"
            )
        self.kind = MemoryKind.PINNED if pinned else MemoryKind.PAGEABLE

    def free(self) -> None:
        """Give the memory back, now or with the last view of it. Idempotent."""
        if self.kind is MemoryKind.PINNED:
            _unpin(self.address)
            self.kind = MemoryKind.PAGEABLE
        self.view.release()
        with contextlib.suppress(BufferError):  # someone still has a view
            self._map.close()


def _map_huge(nbytes: int) -> tuple[mmap.mmap, str]:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    if sys.platform == "linux":  # the flag means something else elsewhere
        with contextlib.suppress(OSError):  # none, or not enough of them, are reserved
            return mmap.mmap(-1, whole, flags=flags | _MAP_HUGETLB), "hugetlb"
    memory = mmap.mmap(-1, nbytes, flags=flags)
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without them
        memory.madvise(mmap.MADV_HUGEPAGE)
        return memory, "advised"
    return memory, "normal"


def _pin(address: int, nbytes: int) -> bool:
    """Register with CUDA where that is in use; pageable memory works everywhere.

    Importing torch takes seconds and pools are made on the loop: without torch there is no CUDA.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0


def _unpin(address: int) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)
