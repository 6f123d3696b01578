"""Random mutations of stored chunks: how many are accepted (must be none), how fast.

Each round damages one sealed chunk (flipped bits, overwritten runs, truncation, spliced or
repeated pieces, crafted sizes) anywhere in header, table, payload or padding, then reads it the way
the restorer does, without the stores' check of the size. Whatever is accepted with any byte of the
object changed, and any error but an IntegrityError, counts against us.

    make bench-fuzz
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import time

from rich.console import Console
from rich.progress import track

from cacheflow.errors import IntegrityError
from cacheflow.kv import decode_header, seal, verify
from cacheflow.types import ChecksumKind, ChunkKey, KVLayout, ObjectKey, Segment, Span

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16", chunk_tokens=32)
KEY = ObjectKey(ChunkKey(bytes(range(32))), Span(0, 3), Span(0, 2))


def make(kind: ChecksumKind, chance: random.Random) -> bytes:
    """A valid object."""
    payload = bytearray(chance.randbytes(LAYOUT.payload_bytes()))
    segments = (Segment(0, 512, 512), Segment(512, 530, 1))
    _, header = seal(
        KEY,
        LAYOUT,
        memoryview(payload),
        grid_id="grid",
        segments=segments,
        canonical=True,
        checksum_kind=kind,
    )
    return header + bytes(payload)


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
            struct.pack_into("<I", bad, chance.choice((8, 12, 24, 28)), chance.getrandbits(32))
        case _:
            at = chance.randrange(len(bad))
            bad[at : at + chance.randint(1, 512)] = b""
            bad += bytes(len(data) - len(bad))
    return bytes(bad)


def accepted(data: bytes) -> bool:
    """Whether a reader would serve it."""
    try:
        info = decode_header(data, expect=KEY)
        offset, length = info.layer_range(Span(0, 3))
        verify(info, Span(0, 3), memoryview(data)[offset : offset + length])
    except IntegrityError:
        return False
    return True


def run(count: int, seed: int) -> dict[str, float]:
    """Mutate ``count`` times."""
    chance = random.Random(seed)
    originals = [make(kind, chance) for kind in ChecksumKind]
    wrong = unchanged = crashes = 0
    start = time.perf_counter()
    for _ in track(range(count), "mutating", console=Console(stderr=True)):
        original = chance.choice(originals)
        bad = mutate(original, chance)
        if bad[: len(original)] == original:  # at most longer: stores refuse that by its size
            unchanged += 1
            continue
        try:
            wrong += accepted(bad)
        except Exception as error:  # any crash counts, whatever it is
            crashes += 1
            print(f"crash: {type(error).__name__}: {error}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "mutations": count - unchanged,
        "accepted": wrong,
        "crashes": crashes,
        "seconds": time.perf_counter() - start,
        "peak_rss_mib": peak,
    }


if __name__ == "__main__":
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
            print(f"{name:>14}  {value:,.1f}")
    raise SystemExit(1 if found["accepted"] or found["crashes"] else 0)
