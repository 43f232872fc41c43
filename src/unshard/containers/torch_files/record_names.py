"""The hash of names that torch writes into `.data/serialization_id`.

torch combines the hashes of the names in the order of a `std::unordered_set`, so both that order
and `std::hash` are those of libstdc++, with which torch is built on Linux.

Sources: torch's `caffe2/serialize/inline_container.cc`, libstdc++'s `hash_bytes.cc` and
`bits/hashtable.h`.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

_MASK = (1 << 64) - 1
_SEED, _FACTOR = 0xC70F6907, 0xC6A4A7935BD1E995
_GOLDEN = 0x9E3779B9
_COUNTS = (
    *(13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229, 172933),
    *(351061, 712697, 1447153),
)  # of buckets, each at least twice the one before


def combined_hash(hashes: Iterable[int]) -> int:
    """Return torch's combination of hashes, `c10::hash_combine`."""
    seed = 0
    for one in hashes:
        seed ^= (one + _GOLDEN + (seed << 6) + (seed >> 2)) & _MASK
    return seed


@lru_cache(maxsize=64)
def hash_of_names(names: tuple[str, ...]) -> int:
    """Return the hash of the names of a file's records, in the order in which they are written."""
    return combined_hash(_as_iterated([_murmur(name.encode()) for name in names]))


def _as_iterated(hashes: Sequence[int]) -> list[int]:
    """Return hashes in the order in which a set iterates that they were inserted into."""
    found: list[int] = []
    for size, count in enumerate(_COUNTS):
        until = count if size + 1 < len(_COUNTS) else len(hashes)
        # A set that is full is first put into more buckets, in the order of iteration.
        found = list(_bucketed([*found, *hashes[len(found) : until]], count))
        if until >= len(hashes):
            break
    return found


def _bucketed(hashes: Iterable[int], count: int) -> Iterator[int]:
    """Yield hashes as a set iterates: what came last is in front, of the buckets and in each."""
    buckets: dict[int, list[int]] = {}
    for one in hashes:
        buckets.setdefault(one % count, []).append(one)
    for bucket in reversed(buckets.values()):
        yield from reversed(bucket)


def _murmur(data: bytes) -> int:
    """Return what `std::hash` gives for a string: MurmurHash64A."""
    found = _SEED ^ (len(data) * _FACTOR & _MASK)
    whole = len(data) // 8 * 8
    for start in range(0, whole, 8):
        part = int.from_bytes(data[start : start + 8], "little") * _FACTOR & _MASK
        part = (part ^ part >> 47) * _FACTOR & _MASK
        found = (found ^ part) * _FACTOR & _MASK
    if data[whole:]:
        found = (found ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    found = (found ^ found >> 47) * _FACTOR & _MASK
    return found ^ found >> 47
