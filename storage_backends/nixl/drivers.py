"""NIXL's drivers for files and objects, as agents of the same reactor: POSIX, GDS and OBJ.

A file, or an object, is to them what a peer is to UCX: something with an address space of so many
bytes from 0 on, that is got to know, read, written and parted from. So reactor, flights, slab and
links are those of :mod:`~cacheflow.storage_backends.nixl.transport`. GDS needs libcufile; without
it opening says so.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from cacheflow.errors import BackendError, ConfigError
from cacheflow.storage_backends.nixl.agent import Transfers, device_of, import_api, segment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cacheflow.storage_backends.nixl.agent import Range, Way
    from cacheflow.types import MemoryKind

__all__ = ["DRIVERS", "Driver", "Named", "StorageAgent"]

Plugin: TypeAlias = Literal["POSIX", "GDS", "GDS_MT", "OBJ"]


@dataclass(frozen=True, slots=True)
class Driver:
    """One of NIXL's plugins with its parameters (NIXL's names, values as text)."""

    plugin: Plugin
    parameters: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of OBJ: bucket, endpoint_override, access_key, secret_key, ... Never shown."""

    @property
    def has_files(self) -> bool:
        """Whether what it opens are paths; else names of objects."""
        return self.plugin != "OBJ"


DRIVERS: Final[Mapping[str, Driver]] = {
    "posix": Driver("POSIX", {"use_aio": "true"}),
    "posix-uring": Driver("POSIX", {"use_uring": "true"}),
    "gds": Driver("GDS"),
    "gds-mt": Driver("GDS_MT"),
    "obj": Driver("OBJ"),
}
"""By the names that people use."""


@dataclass(frozen=True, slots=True)
class Named:
    """What to open: the first ``nbytes`` of a path, or of an object."""

    name: str
    nbytes: int
    writing: bool
    """Make it, or make it so long; else it has to be there, with as many bytes at least."""

    def encode(self) -> bytes:
        """For :meth:`StorageAgent.add`; never leaves the process."""
        return json.dumps([self.name, self.nbytes, self.writing]).encode()


@dataclass(frozen=True, slots=True)
class _Opened:
    number: int
    """What NIXL tells it by: a file descriptor, or a number of ours."""
    nbytes: int
    registered: object


class StorageAgent(Transfers):
    """An :class:`~cacheflow.storage_backends.nixl.agent.Agent` whose peers are files or objects.

    Raises:
        ConfigError: NIXL is not installed, or the plugin cannot be loaded here; says what to do.
    """

    def __init__(self, name: str, driver: Driver) -> None:
        api = import_api()
        self._driver = driver
        self._name = name
        self._segment = "FILE" if driver.has_files else "OBJ"
        self._opened: dict[str, _Opened] = {}
        self._numbers = count(1)
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = api.nixl_agent(name, config)
            self._agent.create_backend(driver.plugin, dict(driver.parameters))
        except Exception as error:  # NIXL's errors have no base class of their own
            raise ConfigError(
                f"NIXL's {driver.plugin} driver cannot be loaded here ({type(error).__name__}: "
                f"{error}): {_NEEDS[driver.plugin]}"
            ) from error

    def register(self, address: int, nbytes: int, kind: MemoryKind) -> object:
        memory = [(address, nbytes, device_of(address, kind), "")]
        return self._agent.register_memory(memory, segment(kind), backends=[self._driver.plugin])

    def deregister(self, registered: object) -> None:
        self._agent.deregister_memory(registered, backends=[self._driver.plugin])

    def metadata(self) -> bytes:
        """Nobody reads our memory."""
        return b""

    def add(self, metadata: bytes) -> str:
        """Open what :meth:`Named.encode` named; its name among the peers.

        Raises:
            BackendError: it is not there, or shorter than it should be.
        """
        named = Named(*json.loads(metadata))
        number = next(self._numbers)
        fd = number
        try:
            fd = self._open_file(named) if self._driver.has_files else self._check_object(named, fd)
            where = [(0, named.nbytes, fd, "" if self._driver.has_files else named.name)]
            plugin = [self._driver.plugin]
            registered = self._agent.register_memory(where, self._segment, backends=plugin)
        except BaseException:
            if self._driver.has_files and fd != number:
                os.close(fd)
            raise
        peer = f"{number} {named.name}"
        self._opened[peer] = _Opened(fd, named.nbytes, registered)
        return peer

    def remove(self, peer: str) -> None:
        opened = self._opened.pop(peer)
        try:
            self.deregister(opened.registered)
        finally:
            if self._driver.has_files:
                os.close(opened.number)

    def begin(
        self, way: Way, peer: str, ours: Sequence[Range], kind: MemoryKind, theirs: Sequence[Range]
    ) -> object:
        number = self._opened[peer].number
        whole = [(0, self._opened[peer].nbytes)]
        if way == "WRITE" and not self._driver.has_files and list(theirs) != whole:
            raise BackendError("an object is written whole, in one piece", operation="transfer")
        device = device_of(ours[0][0], kind)
        local = self._agent.get_xfer_descs([(*each, device) for each in ours], segment(kind))
        remote = self._agent.get_xfer_descs([(*each, number) for each in theirs], self._segment)
        plugin = [self._driver.plugin]
        handle = self._agent.initialize_xfer(way, local, remote, self._name, backends=plugin)
        return self._started(handle)

    def progress(self) -> None:
        """No peer waits for us."""

    def _open_file(self, named: Named) -> int:
        """The descriptor of a path that is long enough, or is made so."""
        flags = os.O_RDWR | os.O_CREAT if named.writing else os.O_RDONLY
        try:
            number = os.open(named.name, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            reason = error.strerror or str(error)
            raise BackendError(reason, operation="open", context=named.name) from None
        try:
            size = os.fstat(number).st_size
            if named.writing and size < named.nbytes:
                os.ftruncate(number, named.nbytes)
            elif size < named.nbytes:
                raise _short(named, size)
        except OSError as error:
            os.close(number)
            reason = error.strerror or str(error)
            raise BackendError(reason, operation="open", context=named.name) from None
        except BaseException:
            os.close(number)
            raise
        return number

    def _check_object(self, named: Named, number: int) -> int:
        """``number``, if the object is there; how long it is NIXL does not say."""
        if not named.writing:
            where = [(0, 0, 0, named.name)]
            [found] = self._agent.query_memory(where, self._driver.plugin, "OBJ")
            if found is None:
                raise BackendError("there is no such object", operation="open", context=named.name)
        return number


def _short(named: Named, size: int) -> BackendError:
    reason = f"it has {size} bytes, not {named.nbytes}"
    return BackendError(reason, operation="open", context=named.name)


_NEEDS: Final[Mapping[Plugin, str]] = {
    "POSIX": "the kernel has to permit io_submit (use_aio) or io_uring (use_uring)",
    "GDS": "it needs CUDA and libcufile (GPUDirect Storage)",
    "GDS_MT": "it needs CUDA and libcufile (GPUDirect Storage)",
    "OBJ": "give it bucket, endpoint_override, access_key and secret_key; the CUDA 13 build lacks "
    "a library for it",
}
