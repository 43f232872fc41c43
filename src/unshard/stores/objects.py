"""Create objects in a bucket, whole or in parts; list and remove objects.

`create` never replaces an object unless asked to. The parts of an upload become an object at its
end; a failed upload is aborted, because the user would pay for parts that remain.
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
"""The least bytes of every part of an upload but the last: S3's rule."""
MOST_PARTS = 10_000
"""The most parts of an upload."""

_TRIES = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """The size in bytes and entity tag of an object; None if the store has no tags."""

    size: int
    etag: str | None

    def is_same(self, other: "Stored") -> bool:
        """Return whether sizes are equal, and tags, if both have a tag.

        Azure's answers to a put have quotes around the tag, its listings do not.
        """
        is_known = self.etag is not None and other.etag is not None
        return self.size == other.size and (not is_known or is_same_tag(self.etag, other.etag))


def create(
    bucket: Bucket, key: str, data: bytes, *, instead_of: str | None = None
) -> Stored | None:
    """Create an object, or replace the object with the entity tag `instead_of`.

    Return None if there is another object.

    The answer to a successful request may be lost, so after every failure the object is read: if it
    has these bytes, the request succeeded. Tags in requests have quotes, but Ceph 16 compares them
    without, so both forms are tried while the object is still the same. Google's store compares the
    object's generation instead, which reading the object reveals.

    Raises:
        StoreError: the store cannot be reached, or denies access.
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
                current = bucket.store.get(key)
                if current.meta["size"] == len(data) and bytes(current.bytes()) == data:
                    return Stored(len(data), current.meta["e_tag"])
                if not is_same_tag(current.meta["e_tag"], instead_of):
                    return None
                version = current.meta["version"]
            except FileNotFoundError:
                if instead_of is not None:
                    return None
            except Exception as again:  # noqa: BLE001
                raise failure(f"{bucket.url}/{key}", again) from None
            if not tries_left:
                raise failure(f"{bucket.url}/{key}", error) from None
    raise AssertionError("the last try returns or raises")


def _mode(instead_of: str | None, version: str | None, *, has_quotes: bool) -> "PutMode":
    """Return the condition of a put: there is no object, or the object has this entity tag."""
    if instead_of is None:
        return "create"
    tag = instead_of.strip('"')
    tag = f'"{tag}"' if has_quotes else tag
    return {"e_tag": tag} if version is None else {"e_tag": tag, "version": version}


def upload(
    bucket: Bucket, key: str, blocks: Iterator[bytearray], *, part_bytes: int, at_once: int
) -> Stored:
    """Write an object from blocks of any size, in parts of `part_bytes`, `at_once` at a time.

    Memory: (`at_once` + 1) * `part_bytes`, and a block. Errors of `blocks` abort the upload and are
    raised.

    Raises:
        StoreError: the store cannot be reached, or denies access.
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
    """Request an object's entity tag, which Ceph 16 leaves out at the end of an upload in parts.

    Raises:
        StoreError: the store cannot be reached, or denies access.
    """
    with refusing(f"{bucket.url}/{key}"):
        return bucket.store.head(key)["e_tag"]


def listed(bucket: Bucket, key: str) -> dict[str, Stored]:
    """Return all objects below a key, by their paths from there, without the cache.

    Raises:
        StoreError: the store cannot be reached, or denies access.
    """
    start = len(key) + 1 if key else 0
    with refusing(f"{bucket.url}/{key}"):
        objects = [item for page in bucket.store.list(key or None) for item in page]
    return {item["path"][start:]: Stored(item["size"], item["e_tag"]) for item in objects}


def remove(bucket: Bucket, key: str) -> None:
    """Remove an object, if it exists.

    Raises:
        StoreError: the store cannot be reached, or denies access.
    """
    with refusing(f"{bucket.url}/{key}"), suppress(FileNotFoundError):
        bucket.store.delete(key)
