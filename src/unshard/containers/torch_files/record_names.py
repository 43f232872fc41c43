"""The hash of names that torch writes into `.data/serialization_id`.

torch combines the hashes of the names in the order of a `std::unordered_set`. Both that order and
`std::hash` are libstdc++'s here, with which torch is built on Linux.

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
)  # numbers of buckets of a growing set


def combined_hash(hashes: Iterable[int]) -> int:
    """Return torch's combination of hashes, `c10::hash_combine`."""
    seed = 0
    for value in hashes:
        seed ^= (value + _GOLDEN + (seed << 6) + (seed >> 2)) & _MASK
    return seed


@lru_cache(maxsize=64)
def hash_of_names(names: tuple[str, ...]) -> int:
    """Return the hash of the names of a file's records, in the order in which they are written."""
    return combined_hash(_as_iterated([_murmur(name.encode()) for name in names]))


def _as_iterated(hashes: Sequence[int]) -> list[int]:
    """Return hashes in the order of iteration of a set after their insertion."""
    ordered: list[int] = []
    for size, count in enumerate(_COUNTS):
        until = count if size + 1 < len(_COUNTS) else len(hashes)
        # A full set moves its elements into more buckets, in the order of iteration.
        ordered = list(_bucketed([*ordered, *hashes[len(ordered) : until]], count))
        if until >= len(hashes):
            break
    return ordered


def _bucketed(hashes: Iterable[int], count: int) -> Iterator[int]:
    """Yield hashes in the order of iteration: the latest bucket and its latest hash come first."""
    buckets: dict[int, list[int]] = {}
    for value in hashes:
        buckets.setdefault(value % count, []).append(value)
    for bucket in reversed(buckets.values()):
        yield from reversed(bucket)


def _murmur(data: bytes) -> int:
    """Return `std::hash` of a string: MurmurHash64A."""
    value = _SEED ^ (len(data) * _FACTOR & _MASK)
    whole = len(data) // 8 * 8
    for start in range(0, whole, 8):
        part = int.from_bytes(data[start : start + 8], "little") * _FACTOR & _MASK
        part = (part ^ part >> 47) * _FACTOR & _MASK
        value = (value ^ part) * _FACTOR & _MASK
    if data[whole:]:
        value = (value ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    value = (value ^ value >> 47) * _FACTOR & _MASK
    return value ^ value >> 47
