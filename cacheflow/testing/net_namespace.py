"""A network namespace with one cable to this one, to pull: for tests of what lies behind a network.

Unlike behind a proxy, nothing goes round it. Needs root and Linux's ``ip``. Blocking. Not for tests
that run beside others: UCX in other processes may take the cable for a way of its own, and fails
when it is pulled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Final, Self

__all__ = ["NetNamespace", "why_no_namespace"]

_INSIDE: Final = "10.231.{}.2"
_OUTSIDE: Final = "10.231.{}.1"


def why_no_namespace() -> str | None:
    """What keeps this process from making one; None if nothing does."""
    if shutil.which("ip") is None:
        return "there is no program ip (package iproute2)"
    try:
        with NetNamespace("probe"):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}"


class NetNamespace:
    """Use it with ``with``; ``name`` is one of few letters that no other on this machine has."""

    def __init__(self, name: str) -> None:
        number = os.getpid() % 250
        self.name: Final = f"cf-{name}-{os.getpid()}"
        self.address: Final = _INSIDE.format(number)
        """Of what is in it."""
        self._gateway: Final = _OUTSIDE.format(number)
        self._cable: Final = f"cf{name[:3]}{os.getpid()}"
        self.command: Final = ("ip", "netns", "exec", self.name)
        """Before the command of a program that is to be in it."""

    def __enter__(self) -> Self:
        _run("ip", "netns", "add", self.name)
        try:
            _run(*f"ip link add {self._cable} type veth peer name eth0 netns {self.name}".split())
            _run(*f"ip addr add {self._gateway}/30 dev {self._cable}".split())
            _run(*f"ip link set {self._cable} up".split())
            _run(*self.command, *f"ip addr add {self.address}/30 dev eth0".split())
            _run(*self.command, *["ip", "link", "set", "lo", "up"])
            self.plug()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        _run("ip", "netns", "del", self.name)  # the cable goes with its end in there

    def unplug(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        _run(*self.command, *["ip", "link", "set", "eth0", "down"])

    def plug(self) -> None:
        """Everything that is sent from now on comes through."""
        _run(*self.command, *["ip", "link", "set", "eth0", "up"])


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
