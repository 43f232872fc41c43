"""Compose objects of S3 from ranges of other objects, which the store copies itself, with boto3.

obstore lacks this request, and requests for uploads of other processes. Like obstore, boto3 finds
credentials in the environment or from the machine; with other credentials the store refuses.
Messages never contain text from a store.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Self

from unshard.errors import StoreError
from unshard.stores import changed
from unshard.stores.buckets import Bucket, quoted
from unshard.stores.objects import Stored, etag_now
from unshard.stores.remote_path import RemotePath

if TYPE_CHECKING:
    from botocore.client import BaseClient

_SCHEMES = ("s3", "s3a")
_SECONDS = 600
_TRIES = 10
_CONNECTIONS = 16
_CODE = re.compile(r"\w{1,64}")
_CHANGED = ("PreconditionFailed", "412", "NoSuchKey", "InvalidRange")


class Composition:
    """The parts of an object during its upload. Thread-safe.

    Args:
        client: boto3's client.
        where: the address of the object, for errors.
        names: bucket, key and upload id, as arguments of requests.
    """

    def __init__(self, client: "BaseClient", where: str, names: dict[str, str]) -> None:
        self._client, self._where, self._names = client, where, names
        self._lock = Lock()
        self._etags: dict[int, str] = {}

    def put(self, number: int, data: bytearray) -> None:
        """Send a part. Numbers begin with 1.

        Raises:
            StoreError: the store cannot be reached, or denies access.
        """
        with _refusing(self._where):
            answer = self._client.upload_part(**self._names, PartNumber=number, Body=data)
        self._add(number, answer["ETag"])

    def copy(self, number: int, source: RemotePath, start: int, length: int) -> None:
        """Let the store copy a part from an object that was opened.

        Raises:
            CorruptError: the object is gone, or has changed since it was opened.
            StoreError: the store cannot be reached, or refuses.
        """
        try:
            answer = self._client.upload_part_copy(
                **self._names,
                PartNumber=number,
                CopySource={"Bucket": _name_of(source.bucket), "Key": source.key},
                CopySourceRange=f"bytes={start}-{start + length - 1}",
                CopySourceIfMatch=quoted(source.opened().etag),
            )
        except Exception as error:  # noqa: BLE001
            if _code(error) in _CHANGED:
                raise changed(str(source)) from None
            raise _failure(self._where, error) from None
        self._add(number, answer["CopyPartResult"]["ETag"])

    def complete(self) -> str:
        """Compose the object of all parts, in the order of their numbers.

        Return its entity tag, or "" if the answer has none.

        Raises:
            StoreError: the store cannot be reached, or rejects the parts.
        """
        etags = sorted(self._etags.items())
        parts = {"Parts": [{"PartNumber": number, "ETag": etag} for number, etag in etags]}
        with _refusing(self._where):
            answer = self._client.complete_multipart_upload(**self._names, MultipartUpload=parts)
        etag: str = answer.get("ETag", "")
        return etag

    def _add(self, number: int, etag: str) -> None:
        with self._lock:
            self._etags[number] = etag


class Copier:
    """Composes objects of parts that S3 copies.

    Args:
        client: boto3's client.
    """

    def __init__(self, client: "BaseClient") -> None:
        self._client = client

    @classmethod
    def into(cls, bucket: Bucket) -> Self | None:
        """Return a copier for a bucket; None if it is not in S3, or boto3 is missing or too old."""
        client = _client() if _is_in_s3(bucket) else None
        return None if client is None else cls(client)

    def can_copy(self, source: Path) -> bool:
        """Return whether a file is an object of S3 with a tag, which reveals a replacement."""
        if not isinstance(source, RemotePath) or not _is_in_s3(source.bucket):
            return False
        return quoted(source.opened().etag) is not None

    def compose(
        self, bucket: Bucket, key: str, size: int, send: Callable[[Composition], None]
    ) -> Stored:
        """Write an object of `size` bytes from the parts that `send` adds before it returns.

        Errors of `send` abort the upload, and are raised.

        Raises:
            StoreError: the store cannot be reached, or denies access.
        """
        where, names = f"{bucket.url}/{key}", {"Bucket": _name_of(bucket), "Key": key}
        with _refusing(where):
            names["UploadId"] = self._client.create_multipart_upload(**names)["UploadId"]
        composition = Composition(self._client, where, names)
        try:
            send(composition)
            return Stored(size, composition.complete() or etag_now(bucket, key))
        except BaseException:
            with suppress(Exception):  # the first error is raised, not that of the abort
                self._client.abort_multipart_upload(**names)
            raise

    def abort_uploads(self, bucket: Bucket, folder: str, keys: Collection[str]) -> None:
        """Abort all processes' unfinished uploads of objects in a folder.

        Raises:
            StoreError: the store cannot be reached, or denies access.
        """
        name = _name_of(bucket)
        paginate = self._client.get_paginator("list_multipart_uploads").paginate
        with _refusing(f"{bucket.url}/{folder}"):
            pages = paginate(Bucket=name, Prefix=folder)
            uploads = [upload for page in pages for upload in page.get("Uploads", ())]
            for upload in uploads:
                if upload["Key"] in keys:
                    key, number = upload["Key"], upload["UploadId"]
                    self._abort({"Bucket": name, "Key": key, "UploadId": number})

    def _abort(self, names: dict[str, str]) -> None:
        try:
            self._client.abort_multipart_upload(**names)
        except Exception as error:
            if _code(error) != "NoSuchUpload":  # it has ended in the meantime
                raise


def _is_in_s3(bucket: Bucket) -> bool:
    return bucket.url.partition(":")[0] in _SCHEMES


def _name_of(bucket: Bucket) -> str:
    return bucket.url.partition("://")[2]


def _client() -> "BaseClient | None":
    try:
        from boto3.session import Session
        from botocore.config import Config

        config = Config(
            retries={"mode": "standard", "max_attempts": _TRIES},
            read_timeout=_SECONDS,
            max_pool_connections=_CONNECTIONS,
            request_checksum_calculation="when_required",  # other servers reject checksums
            response_checksum_validation="when_required",
        )
    except (ImportError, TypeError):
        return None
    find = os.environ.get  # obstore reads the same variables
    endpoint = find("AWS_ENDPOINT_URL_S3") or find("AWS_ENDPOINT_URL") or find("AWS_ENDPOINT")
    region = find("AWS_REGION") or find("AWS_DEFAULT_REGION")
    return Session().client("s3", endpoint_url=endpoint, region_name=region, config=config)


def _code(error: Exception) -> str:
    """Return the code in an error answer, or ""."""
    code = getattr(error, "response", {}).get("Error", {}).get("Code", "")
    return code if _CODE.fullmatch(code) else ""


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Raise StoreError in place of botocore's errors, which have no common base."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        raise _failure(where, error) from None


def _failure(where: str, error: Exception) -> StoreError:
    status = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode", "")
    if status:
        return StoreError(f"{where}: the store answers {status} {_code(error)}".rstrip())
    return StoreError(f"{where}: the request failed ({type(error).__name__})")
