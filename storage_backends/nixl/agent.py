"""One NIXL agent as this package uses it: registered memory, peers, transfers, progress.

The only module that knows NIXL's own names. An agent belongs to one thread at a time (NIXL's are
not thread-safe), which is the reactor's; nothing here waits. NIXL's progress thread stays off: it
burns a core in every idle process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from cacheflow.errors import BackendError, ConfigError
from cacheflow.types import MemoryKind

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "INSTALL",
    "Agent",
    "Range",
    "Transfers",
    "UcxAgent",
    "Way",
    "device_of",
    "import_api",
    "segment",
    "why_missing",
]

INSTALL: Final = "pip install --no-deps nixl-cu12==1.5.1 nixl==1.5.1 numpy"
"""Enough without CUDA: plain ``pip install nixl`` brings gigabytes of it."""

Way: TypeAlias = Literal["READ", "WRITE"]
_BUILDS: Final = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_DEVICE_ORDINAL: Final = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL of the CUDA driver."""
Range: TypeAlias = tuple[int, int]
"""``(address, nbytes)`` in the process that owns the memory."""


class Agent(Protocol):
    """What the reactor needs. All methods may raise; none waits for a peer."""

    def register(self, address: int, nbytes: int, kind: MemoryKind) -> object:
        """Make memory known to the hardware; the answer is for :meth:`deregister`."""
        ...

    def deregister(self, registered: object) -> None: ...

    def metadata(self) -> bytes:
        """What a peer needs for :meth:`add`: how to connect, and the memory registered so far."""
        ...

    def add(self, metadata: bytes) -> str:
        """Get to know a peer; the answer is its name."""
        ...

    def remove(self, peer: str) -> None:
        """Disconnect. What is in flight may still touch our memory: only call it with nothing."""
        ...

    def begin(
        self, way: Way, peer: str, ours: Sequence[Range], kind: MemoryKind, theirs: Sequence[Range]
    ) -> object:
        """Start one transfer of ranges that match in length, pair by pair."""
        ...

    def has_ended(self, transfer: object) -> bool:
        """Whether it is complete; raises if it has failed. Makes progress, too."""
        ...

    def release(self, transfer: object) -> None:
        """Free what a transfer that has ended took."""
        ...

    def progress(self) -> None:
        """Do what peers have asked of our memory since the last call."""
        ...


class Transfers:
    """What becomes of transfers is told alike by all of NIXL's drivers."""

    _agent: Any

    def _started(self, handle: Any) -> object:
        """``handle``, under way."""
        try:
            self._agent.transfer(handle)
        except BaseException:
            with contextlib.suppress(Exception):  # it may be active for all that NIXL knows
                handle.release()  # now: else it does so by itself whenever, on whatever thread
            raise
        return handle

    def has_ended(self, transfer: object) -> bool:
        state = self._agent.check_xfer_state(transfer)
        if state == "ERR":
            raise BackendError("NIXL says ERR", operation="transfer", is_temporary=True)
        return bool(state == "DONE")

    def release(self, transfer: object) -> None:
        self._agent.release_xfer_handle(transfer)


class UcxAgent(Transfers):
    """An :class:`Agent` over UCX, which picks the transport (``UCX_TLS`` in the environment).

    Raises:
        ConfigError: NIXL is not installed, or UCX finds nothing to work with; says what to do.
    """

    def __init__(self, name: str) -> None:
        api = import_api()
        check_fabric()
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(name, config)
        except Exception as error:  # NIXL's errors have no base class of their own
            raise ConfigError(f"NIXL cannot start UCX: {error} ({_ucx_settings()})") from error
        if "UCX" not in self._agent.backends:
            raise ConfigError("this NIXL comes without UCX: " + INSTALL)
        self.name = name

    def register(self, address: int, nbytes: int, kind: MemoryKind) -> object:
        memory = [(address, nbytes, device_of(address, kind), "")]
        return self._agent.register_memory(memory, segment(kind))

    def deregister(self, registered: object) -> None:
        self._agent.deregister_memory(registered)

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add(self, metadata: bytes) -> str:
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, peer: str) -> None:
        self._agent.remove_remote_agent(peer)

    def begin(
        self, way: Way, peer: str, ours: Sequence[Range], kind: MemoryKind, theirs: Sequence[Range]
    ) -> object:
        # Lists made for each transfer: for a handful of ranges that is four times faster than
        # picking pages by index out of lists prepared for the whole arenas (docs/nixl.md).
        device = device_of(ours[0][0], kind)
        local = self._agent.get_xfer_descs([(*each, device) for each in ours], segment(kind))
        remote = self._agent.get_xfer_descs([(*each, 0) for each in theirs], "DRAM")
        handle = self._agent.initialize_xfer(way, local, remote, peer)
        return self._started(handle)

    def progress(self) -> None:
        self._agent.get_new_notifs()


def check_fabric() -> None:
    """Raises ConfigError where UCX would have nothing but sockets, unless ``UCX_TLS`` asks for it.

    Over sockets UCX reads remote memory by messages, and a store whose client goes away in the
    middle of one can end with "Fatal: unexpected error" (docs/nixl.md). Our own tcp transport is
    as fast there, and does not.
    """
    if "UCX_TLS" not in os.environ and not any(_RDMA_DEVICES.glob("*")):
        raise ConfigError(
            f"no RDMA device is here ({_RDMA_DEVICES} is empty): transport tcp does as well; to "
            "use NIXL all the same, set UCX_TLS (all: whatever UCX finds)"
        )


def why_missing() -> str | None:
    """What keeps NIXL from being imported here, in a sentence; None if nothing does."""
    try:
        import_api()
    except ConfigError as error:
        return str(error)
    return None


def import_api() -> Any:
    """``nixl._api``, without what importing it does to logging."""
    if not any(_RDMA_DEVICES.glob("*")):
        # Of no use here, and libnl, which it brings, crashes the process when that ends (1.5.1:
        # "Segmentation fault" in rtnl_tc_unregister, exit status 139).
        os.environ.setdefault("UCX_MODULES", "^ib")
    raises = logging.raiseExceptions
    try:
        # Of several builds ``nixl`` chooses one, for which it may import torch: seconds.
        installed = [name for name in _BUILDS if find_spec(name) is not None]
        api = import_module(f"{installed[0] if len(installed) == 1 else 'nixl'}._api")
    except ImportError as error:
        raise ConfigError(f"NIXL cannot be imported ({error}); to install it: {INSTALL}") from error
    finally:
        logging.raiseExceptions = raises
    if "NIXL_LOG_LEVEL" not in os.environ:  # else every agent writes to our standard output
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return api


def segment(kind: MemoryKind) -> str:
    """NIXL's word for it."""
    return "VRAM" if kind is MemoryKind.DEVICE else "DRAM"


def device_of(address: int, kind: MemoryKind) -> int:
    """The CUDA device on which ``address`` lies; 0 for memory of the host. Not tried on a real one.

    Raises:
        ConfigError: CUDA does not know the address.
    """
    if kind is not MemoryKind.DEVICE:
        return 0
    device = ctypes.c_int(-1)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"device memory at {address:#x}, and no CUDA driver: {error}") from error
    status = cuda.cuPointerGetAttribute(
        ctypes.byref(device), _DEVICE_ORDINAL, ctypes.c_void_p(address)
    )
    if status:
        raise ConfigError(f"CUDA does not know device memory at {address:#x} (error {status})")
    return device.value


def _ucx_settings() -> str:
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name[:4] == "UCX_"]
    return ", ".join(found) or "no UCX_ variables are set"
