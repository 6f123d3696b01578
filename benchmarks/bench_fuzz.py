"""Random mutations of stored chunks: how many are accepted (must be none), how fast.

Each round damages one sealed chunk (raw, compressed or quantized; authenticated or not) anywhere in
header, table, payload or padding, then reads it the way the restorer does, without the stores'
check of the size: header, whose chunk it is, payload, decoding. Half of the damage to authenticated
chunks is done by somebody who can compute every checksum, only not the tags. Whatever is accepted
with any byte of the object changed, and any error but an IntegrityError, counts against us; so does
memory.

    make bench-fuzz
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from rich.console import Console
from rich.progress import track
from xxhash import xxh3_64_intdigest

from cacheflow.errors import IntegrityError
from cacheflow.kv import (
    PREFIX_BYTES,
    ChunkAuth,
    Stamp,
    check_layout,
    check_stamp,
    checksum,
    decode_header,
    decode_layers,
    encode_header,
    seal,
    verify,
)
from cacheflow.types import ChecksumKind, ChunkKey, Codec, KVLayout, ObjectKey, Segment, Span

LAYOUT: Final = KVLayout(
    num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16", chunk_tokens=72
)
"""Layer blocks of 9,216 bytes in three pages: there is padding, and something to win."""
KEY: Final = ObjectKey(ChunkKey(bytes(range(32))), Span(0, 3), Span(0, 2))
AUTH: Final = ChunkAuth(b"what only the writer has")
MOST_GROWTH: Final = 64 << 20
"""Bytes by which the process may grow while it reads all that."""
_SUM_AT: Final = 16


@dataclass(frozen=True)
class Target:
    """A valid object, and how its reader looks at it."""

    name: str
    data: bytes
    stamp: Stamp

    @property
    def reader_has_key(self) -> bool:
        return self.stamp.auth is not None


def targets(chance: random.Random) -> list[Target]:
    """Every kind of checksum and codec, with and without authentication."""
    kinds = [(Codec.RAW, kind) for kind in ChecksumKind]
    kinds += [(codec, ChecksumKind.XXH3) for codec in Codec if codec is not Codec.RAW]
    kinds.append((Codec.ZSTD, ChecksumKind.WSUM))
    return [
        Target(f"{codec}/{kind}{'/auth' if auth else ''}", make(codec, kind, auth, chance), stamp)
        for auth, stamp in ((None, Stamp()), (AUTH, Stamp(auth=AUTH)))
        for codec, kind in kinds
    ]


def make(codec: Codec, kind: ChecksumKind, auth: ChunkAuth | None, chance: random.Random) -> bytes:
    """A valid object of small whole numbers, which every codec can take and shrink."""
    payload = bytearray(LAYOUT.payload_bytes())
    for at in range(0, len(payload), 2):
        payload[at : at + 2] = struct.pack("<f", float(chance.randrange(-4, 5)))[2:]
    info, header = seal(
        KEY,
        LAYOUT,
        memoryview(payload),
        grid_id="grid",
        segments=(Segment(0, 512, 512), Segment(512, 530, 1)),
        canonical=True,
        codec=codec,
        checksum_kind=kind,
        stamp=Stamp(auth=auth),
    )
    assert info.codec is codec
    return header + bytes(payload[: info.nbytes - len(header)])


def mutate(data: bytes, chance: random.Random) -> bytes:
    """One random damage."""
    bad = bytearray(data)
    match chance.randrange(7):
        case 0:
            for _ in range(chance.randint(1, 8)):
                bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        case 1:
            at = chance.randrange(len(bad))
            run = chance.randbytes(chance.randint(1, 64))
            bad[at : at + len(run)] = run[: len(bad) - at]
        case 2:
            del bad[chance.randrange(len(bad)) :]
        case 3:
            a, b = (chance.randrange(len(bad)) for _ in range(2))
            size = chance.randint(1, 512)
            bad[a : a + size] = bad[b : b + size]
        case 4:
            del bad[(at := chance.randrange(len(bad))) : at + chance.randint(1, 4096)]
        case 5:
            at = chance.choice((8, 12, PREFIX_BYTES, PREFIX_BYTES + 4, chance.randrange(600)))
            struct.pack_into("<I", bad, at, chance.getrandbits(32))
        case _:
            at = chance.randrange(len(bad))
            bad[at : at + chance.randint(1, 512)] = b""
            bad += bytes(len(data) - len(bad))
    return bytes(bad)


def forge(data: bytes, chance: random.Random) -> bytes:
    """Damage by somebody who makes every checksum right again, of header and payload."""
    bad = bytearray(data)
    info = decode_header(data)
    if chance.random() < 0.5:
        at = chance.randrange(info.payload_offset, len(bad))
        bad[at] ^= 1 << chance.randrange(8)
        return _with_right_table(bytes(bad))
    for _ in range(chance.randint(1, 3)):
        bad[chance.randrange(24, 900)] = chance.randrange(256)
    total = xxh3_64_intdigest(bytes(bad[8:_SUM_AT] + bad[24 : info.payload_offset]))
    struct.pack_into("<Q", bad, _SUM_AT, total)
    return bytes(bad)


def _with_right_table(data: bytes) -> bytes:
    info = decode_header(data)
    payload = memoryview(data)[info.payload_offset :]
    encoded = info.codec is not Codec.RAW
    sums, at = [], 0
    for size in info.block_sizes(Span(0, 3)):
        edges = [at, at + size]
        if not encoded:
            edges = [at + n * LAYOUT.head_bytes for n in range(4)] + [at + size]
        sums += [checksum(info.checksum_kind, payload[a:b]) for a, b in pairwise(edges)]
        at += size
    header = encode_header(replace(info, checksums=struct.pack(f"<{len(sums)}Q", *sums)))
    return header + bytes(payload)


def accepted(data: bytes, stamp: Stamp) -> bool:
    """Whether a reader would serve it."""
    whole = Span(0, 3)
    try:
        info = decode_header(data, expect=KEY)
        check_layout(info, LAYOUT)
        check_stamp(info, stamp)
        offset, length = info.layer_range(whole)
        view = memoryview(bytearray(data[offset : offset + length]))
        verify(info, whole, view, stamp.auth)
        if info.codec is not Codec.RAW:
            decode_layers(info, whole, view, memoryview(bytearray(LAYOUT.payload_bytes())))
    except IntegrityError:
        return False
    return True


def run(count: int, seed: int) -> dict[str, float]:
    """Mutate ``count`` times."""
    chance = random.Random(seed)
    originals = targets(chance)
    for target in originals:
        assert accepted(target.data, target.stamp), target.name
    wrong = unchanged = crashes = forged = 0
    before = _peak()
    start = time.perf_counter()
    for _ in track(range(count), "mutating", console=Console(stderr=True)):
        target = chance.choice(originals)
        forging = target.reader_has_key and chance.random() < 0.5
        bad = (forge if forging else mutate)(target.data, chance)
        if bad[: len(target.data)] == target.data:  # at most longer: stores refuse that by its size
            unchanged += 1
            continue
        forged += forging
        try:
            if accepted(bad, target.stamp):
                wrong += 1
                print(f"accepted: {target.name}")
        except Exception as error:  # any crash counts, whatever it is
            crashes += 1
            print(f"crash: {target.name}: {type(error).__name__}: {error}")
    return {
        "mutations": count - unchanged,
        "with_right_checksums": forged,
        "accepted": wrong,
        "crashes": crashes,
        "seconds": time.perf_counter() - start,
        "growth_mib": (_peak() - before) / 2**20,
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = run(options.count, options.seed)
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:>20}  {value:,.1f}")
    sys.exit(bool(found["accepted"] or found["crashes"] or found["growth_mib"] > MOST_GROWTH >> 20))


if __name__ == "__main__":
    main()
