"""The sockets of the server, bound before anything is loaded: a port that is taken is said at once.

They do not listen yet, so that whoever asks before the model is there is refused by the system.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["addresses_of", "bound", "cannot_listen", "url_of"]

_ADVICE: Final = {
    errno.EADDRINUSE: "choose another port, or stop what has it",
    errno.EADDRNOTAVAIL: "choose an address of this machine: 127.0.0.1, or 0.0.0.0 for all",
    errno.EACCES: "choose a port above 1023, or run it as a user that may have this one",
}


async def addresses_of(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
    """Family and address of each place that ``host`` stands for.

    Raises:
        ConfigError: it stands for none.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"server setting host: {host!r} is no address: {why}; {_ADVICE[errno.EADDRNOTAVAIL]}"
        ) from None
    return list(dict.fromkeys((family, address) for family, *_, address in found))


@contextmanager
def bound(
    host: str, port: int, addresses: Sequence[tuple[int, tuple[object, ...]]]
) -> Iterator[list[socket.socket]]:
    """A socket for each of ``addresses`` that this machine has, bound; closed at the end.

    Two servers that start at the same time may both get here: the later one to listen is told then.

    Raises:
        ConfigError: none can be bound, or one is taken; says which and what to do.
    """
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        missing: OSError | None = None
        for family, address in addresses:
            try:
                sockets.append(stack.enter_context(_bind(family, address)))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise cannot_listen(host, port, error) from None
                missing = error  # `localhost` is ::1 too, where there is no IPv6
        if missing is not None and not sockets:
            raise cannot_listen(host, port, missing) from None
        yield sockets


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """What a person is told of ``error``."""
    advice = _ADVICE.get(error.errno or 0, "choose another host or port")
    why = error.strerror or error
    return ConfigError(f"cannot listen on {host}:{port}: {why}; {advice}")


def url_of(made: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port, *_ = made.getsockname()
    return f"http://[{host}]:{port}" if made.family == socket.AF_INET6 else f"http://{host}:{port}"
