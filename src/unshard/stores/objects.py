"""Writing into a bucket: objects that do not exist yet, whole or in parts; listing and removing.

What is written by `create` never replaces an object. The parts of an upload become an object when
all are there; an upload that fails is aborted, so that its parts are not left, and paid for.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unshard.errors import UnshardError
from unshard.stores.buckets import Bucket, failure, is_same_tag, refusing

if TYPE_CHECKING:
    from obstore import PutMode

LEAST_PART = 5 << 20
"""The least that every part of an upload but the last may have, bytes. This is S3's rule."""
MOST_PARTS = 10_000
"""The most parts that an upload may have."""

_TRIES = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as a store has it: its size in bytes, and its entity tag if the store has those."""

    size: int
    etag: str | None

    def is_same(self, other: "Stored") -> bool:
        """Return whether sizes agree, and tags where both have one.

        Azure's answers to a put have quotes around the tag, its listings do not.
        """
        is_known = self.etag is not None and other.etag is not None
        return self.size == other.size and (not is_known or is_same_tag(self.etag, other.etag))


def create(
    bucket: Bucket, key: str, data: bytes, *, instead_of: str | None = None
) -> Stored | None:
    """Write an object where there is none, or in place of the one with an entity tag.

    Return None if there is another one.

    The answer to a request may be lost after the store has done what it asks for. So after every
    failure the object is read: what has these very bytes is ours. Tags of requests have quotes, but
    Ceph 16 compares them without: if the object is still the same, each form is tried in turn.
    Google's store compares the object's generation instead, which is known when it was read.

    Raises:
        StoreError: the store cannot be reached, or does not allow it.
    """
    version: str | None = None
    for tries_left in reversed(range(_TRIES)):
        mode = _mode(instead_of, version, has_quotes=tries_left % 2 == 1)
        try:
            put = bucket.store.put(key, data, mode=mode, use_multipart=False)
            return Stored(len(data), put["e_tag"])
        except UnshardError:
            raise
        except Exception as error:  # noqa: BLE001 (obstore's errors have no common base)
            try:
                found = bucket.store.get(key)
                if found.meta["size"] == len(data) and bytes(found.bytes()) == data:
                    return Stored(len(data), found.meta["e_tag"])
                if not is_same_tag(found.meta["e_tag"], instead_of):
                    return None
                version = found.meta["version"]
            except FileNotFoundError:
                if instead_of is not None:
                    return None
            except Exception as again:  # noqa: BLE001
                raise failure(f"{bucket.url}/{key}", again) from None
            if not tries_left:
                raise failure(f"{bucket.url}/{key}", error) from None
    raise AssertionError("the last try returns or raises")


def _mode(instead_of: str | None, version: str | None, *, has_quotes: bool) -> "PutMode":
    """Return the condition of a put: that there is no object, or the one with an entity tag."""
    if instead_of is None:
        return "create"
    tag = instead_of.strip('"')
    tag = f'"{tag}"' if has_quotes else tag
    return {"e_tag": tag} if version is None else {"e_tag": tag, "version": version}


def upload(
    bucket: Bucket, key: str, blocks: Iterator[bytearray], *, part_bytes: int, at_once: int
) -> Stored:
    """Write an object from blocks of any size, in parts of `part_bytes`, `at_once` under way.

    Memory: (`at_once` + 1) * `part_bytes`, and a block. What `blocks` raises aborts the upload, and
    is raised.

    Raises:
        StoreError: the store cannot be reached, or does not allow it.
    """
    sizes: list[int] = []
    raised: list[BaseException] = []

    def watched() -> Iterator[bytearray]:
        try:
            for block in blocks:
                sizes.append(len(block))
                yield block
        except BaseException as error:
            raised.append(error)
            raise

    try:
        put = bucket.store.put(key, watched(), chunk_size=part_bytes, max_concurrency=at_once)
    except Exception as error:  # noqa: BLE001 (obstore's errors have no common base)
        raise raised[0] if raised else failure(f"{bucket.url}/{key}", error) from None
    return Stored(sum(sizes), put["e_tag"] or etag_now(bucket, key))


def etag_now(bucket: Bucket, key: str) -> str | None:
    """Return an object's entity tag: Ceph 16 does not tell it when an upload in parts ends.

    Raises:
        StoreError: the store cannot be reached, or does not allow it.
    """
    with refusing(f"{bucket.url}/{key}"):
        return bucket.store.head(key)["e_tag"]


def listed(bucket: Bucket, key: str) -> dict[str, Stored]:
    """Return everything below a key as it is now, by the path from there.

    Raises:
        StoreError: the store cannot be reached, or does not allow it.
    """
    start = len(key) + 1 if key else 0
    with refusing(f"{bucket.url}/{key}"):
        pages = bucket.store.list(key or None)
        objects = [one for page in pages for one in page]
    return {one["path"][start:]: Stored(one["size"], one["e_tag"]) for one in objects}


def remove(bucket: Bucket, key: str) -> None:
    """Remove an object; it is not an error if there is none.

    Raises:
        StoreError: the store cannot be reached, or does not allow it.
    """
    with refusing(f"{bucket.url}/{key}"), suppress(FileNotFoundError):
        bucket.store.delete(key)
