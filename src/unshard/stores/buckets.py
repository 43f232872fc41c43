"""List buckets and read ranges of their objects, with obstore.

obstore finds credentials, endpoints and regions in the environment or from the machine. Messages
never contain text from a store or from obstore, which may include a key, a token or a signed
address.
"""

import os
import re
import stat
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unshard.errors import StoreError, UnshardError, UsageError, how_to_install
from unshard.stores import OTHER_SCHEMES, changed, gone
from unshard.stores.nodes.files import Copy
from unshard.stores.nodes.store import NodeStore
from unshard.stores.other_stores import FileRange, HubStore, WebStore

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_CUT_RETRIES = 3
"""How often the rest of a truncated body is requested; obstore itself retries whole requests."""
_REQUEST_RETRIES = 10
_SILENT = "30s"  # after this silence a request to a web server is repeated, for three minutes
_STREAMED = 1 << 20
_STAT_FIELDS = 10

_STATUS = re.compile(r"status code: (\d{3} [A-Z][A-Za-z ]*)")
_ODD_KEY = re.compile(r'with invalid path: [^"]*"([^"\n]{1,999})"')
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_CUT, _LATE = "the connection was cut", "it did not answer in time"
_WHOLE = "the server sends the whole file instead of a range"
_KNOWN_REASONS = {
    "ConnectionRefused": "the connection was refused",
    "dns error": "its host name cannot be resolved",
    "TimedOut": _LATE,
    "timed out": _LATE,
    "certificate": "its certificate was rejected",
    "IncompleteMessage": _CUT,
    "ConnectionReset": _CUT,
    "kind: Decode": _CUT,
    "kind: Body": _CUT,
    "kind: Connect": "the connection failed",
    "builder error": "the endpoint cannot be used: http:// needs AWS_ALLOW_HTTP=true (or AZURE_…)",
    "Range request not supported": _WHOLE,
    "MissingContentLength": "the server does not send the size of a file",
    "OpenCredentials": "the credentials file cannot be read",
    "DecodeCredentials": "the credentials file is malformed",
    "InvalidAccessKey": "AZURE_STORAGE_ACCOUNT_KEY is not a key",
    "MissingAccount": "the account is missing: set AZURE_STORAGE_ACCOUNT_NAME",
    "credential": "no credentials were found",
}
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "a": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Environment variables for a store, by the start of its addresses."""


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """An object in a listing.

    Attributes:
        size: bytes.
        etag: changes with the content; None if the store has no tags.
        modified: time of the last write, nanoseconds since 1970.
        copies: its copies on the nodes of a cluster.
    """

    size: int
    etag: str | None
    modified: int
    copies: tuple[Copy, ...] = ()

    @property
    def status(self) -> os.stat_result:
        """A status like a file's; replacing the object changes inode and device."""
        fields = [0] * _STAT_FIELDS
        fields[stat.ST_MODE] = stat.S_IFREG | 0o444
        fields[stat.ST_NLINK] = 1
        fields[stat.ST_INO] = fields[stat.ST_DEV] = zlib.crc32((self.etag or "").encode())
        fields[stat.ST_SIZE] = self.size
        seconds = self.modified // 10**9
        fields[stat.ST_ATIME] = fields[stat.ST_MTIME] = fields[stat.ST_CTIME] = seconds
        times = ("st_atime_ns", "st_mtime_ns", "st_ctime_ns")
        return os.stat_result(fields, dict.fromkeys(times, self.modified))

    def is_of(self, answer: "ObjectMeta") -> bool:
        """Return whether an answer may be about this object, by tag, or by size and time."""
        tag = answer["e_tag"]
        if tag is not None and self.etag is not None:
            return is_same_tag(tag, self.etag)
        seconds = int(answer["last_modified"].timestamp())  # 0 if the answer has no time
        return answer["size"] == self.size and seconds in (0, self.modified // 10**9)


def client(url: str) -> "ObjectStore":
    """Return obstore's client of a bucket.

    Raises:
        UsageError: obstore is not installed.
        StoreError: obstore rejects the address or its configuration.
    """
    try:
        from obstore.store import HTTPStore, from_url
    except ImportError:
        raise UsageError(
            f"{url}: reading object stores needs obstore, which is not installed",
            hint=how_to_install("obstore", "remote"),
        ) from None
    retries: RetryConfig = {"max_retries": _REQUEST_RETRIES}
    with refusing(url):
        if url.startswith("http"):
            options: ClientConfig = {"allow_http": True, "timeout": "300s", "read_timeout": _SILENT}
            return HTTPStore.from_url(url, client_options=options, retry_config=retries)
        return from_url(url, retry_config=retries)


class Bucket:
    """A bucket with cached listings. Thread-safe.

    Keys have no slash at their ends; "" is the bucket itself.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.RLock()
        self._store: ObjectStore | None = None
        self._other: WebStore | HubStore | NodeStore | None = None
        self._listings: dict[str, dict[str, ObjectEntry | None]] = {}
        self._user_keys: set[str] = set()

    @property
    def store(self) -> "ObjectStore":
        """Obstore's client.

        Raises:
            UsageError: obstore does not support this scheme, which is read-only here.
        """
        if _is_other(self.url):
            raise UsageError(
                f"{self.url}: is read-only",
                expected="a path, s3://, gs:// or az://",
            )
        with self._lock:
            if self._store is None:
                self._store = client(self.url)
            return self._store

    def _readable(self) -> "ObjectStore | WebStore | HubStore | NodeStore":
        if not _is_other(self.url):
            return self.store
        with self._lock:
            if self._other is None and self.url.startswith("node:"):
                self._other = NodeStore(self.url, self._user_keys)
            elif self._other is None and self.url.startswith("hf:"):
                self._other = HubStore(self.url)
            elif self._other is None:
                self._other = WebStore(client(self.url), self._user_keys)
            return self._other

    def forget(self, user_key: str | None = None) -> None:
        """Drop all listings.

        `user_key` is a key from a user; folders above it may be denied. The client is dropped, too,
        because the environment may have changed since the user's last key.
        """
        with self._lock:
            self._listings.clear()
            if user_key is not None:
                self._user_keys.add(user_key)
                self._store = self._other = None

    def children(self, key: str) -> dict[str, ObjectEntry | None]:
        """Return the objects and folders directly below a key, by name; None for each folder.

        Raises:
            StoreError: the store cannot be reached, or denies access.
        """
        with self._lock:
            if key not in self._listings:
                self._listings[key] = self._list(key)
            return self._listings[key]

    def entry(self, key: str) -> ObjectEntry | None:
        """Return the object of this key, or None.

        Raises:
            StoreError: as for `children`.
        """
        parent, _, name = key.rpartition("/")
        return self.children(parent).get(name) if key else None

    def entry_to_read(self, key: str) -> ObjectEntry | None:
        """Return the object of this key, or None, and check that its copies are the same.

        Raises:
            StoreError: as for `children`.
            CorruptError: nodes have different files under this key.
        """
        entry = self.entry(key)
        if entry is not None and len(entry.copies) > 1:
            store = self._readable()
            if isinstance(store, NodeStore):
                store.check(key, entry.copies)
        return entry

    def is_folder(self, key: str) -> bool:
        """Return whether there are objects below a key; the bucket itself is one.

        Raises:
            StoreError: as for `children`.
        """
        is_listed = self._is_listed_folder(key)
        # Listings of other stores may be partial, so only their presence proves anything.
        if is_listed or (is_listed is False and not _is_other(self.url)):
            return is_listed
        return bool(self.children(key)) or not key

    def _is_listed_folder(self, key: str) -> bool | None:
        """Return whether a key is a folder in a cached listing above it; None without a listing.

        An empty listing proves nothing, because it may have been denied.
        """
        above, rest = "", key
        while rest:
            name, _, rest = rest.partition("/")
            with self._lock:
                listed = self._listings.get(above)
            if listed and (name not in listed or listed[name] is not None):
                return False
            if listed and not rest:
                return True
            above = f"{above}/{name}".lstrip("/")
        return None

    def chunks(self, key: str, entry: ObjectEntry, start: int, length: int) -> Iterator[memoryview]:
        """Yield an object's bytes from `start` on as they arrive; truncated answers are continued.

        Raises:
            CorruptError: the object is gone, or has changed since it was listed.
            StoreError: the store cannot be reached, or denies access.
        """
        cuts = 0
        while True:
            try:
                for data in self._get(key, entry, start, length).stream(_STREAMED):
                    block = memoryview(data)[:length]
                    start, length = start + len(block), length - len(block)
                    yield block
                error = None
            except UnshardError:
                raise
            except Exception as raised:  # noqa: BLE001 (obstore's errors have no common base)
                error = raised
            if not length:
                return
            cuts += 1
            if error is not None and (cuts > _CUT_RETRIES or _reason(error) == _LATE):
                raise self._failed(key, error) from None
            if cuts > _CUT_RETRIES:
                raise StoreError(f"{self.url}/{key}: every answer ends early, at byte {start}")

    def _get(
        self, key: str, entry: ObjectEntry, start: int, length: int
    ) -> "GetResult | FileRange":
        store = self._readable()
        try:
            if isinstance(store, NodeStore):
                return store.get(key, entry.copies, start, start + length)
            options: GetOptions = {"range": (start, start + length)}
            if etag := quoted(entry.etag):
                options["if_match"] = etag
            answer = store.get(key, options=options)
            if not isinstance(answer, FileRange) and not entry.is_of(answer.meta):
                # Some servers ignore If-Match.
                raise changed(f"{self.url}/{key}")  # noqa: TRY301
            return answer  # noqa: TRY300
        except UnshardError:
            raise
        except Exception as error:  # noqa: BLE001 (obstore's errors have no common base)
            raise self._failed(key, error) from None

    def _failed(self, key: str, error: Exception) -> UnshardError:
        where = f"{self.url}/{key}"
        if isinstance(error, FileNotFoundError):
            return gone(where)
        if type(error).__name__ == "PreconditionError" or "416 Range" in str(error)[:2000]:
            return changed(where)
        return failure(where, error)

    def _list(self, key: str) -> dict[str, ObjectEntry | None]:
        store = self._readable()
        for tries_left in reversed(range(1 + _CUT_RETRIES)):
            try:
                listed = store.list_with_delimiter(key)
                break
            except UnshardError:
                raise
            except Exception as error:  # noqa: BLE001 (obstore's errors have no common base)
                start = f"{key}/" if key else ""
                is_above = any(own != key and own.startswith(start) for own in self._user_keys)
                if is_above and _is_denied(error):
                    return {}  # the right to read a folder does not include listing its parents
                if not tries_left or _reason(error) != _CUT:
                    raise failure(f"{self.url}/{key}".rstrip("/"), error) from None
        entries: dict[str, ObjectEntry | None] = {}
        for item in listed["objects"]:
            modified = int(item["last_modified"].timestamp() * 1e9)
            copies: Any = item.get("copies", ())
            entry = ObjectEntry(item["size"], item["e_tag"], modified, copies)
            entries[item["path"].rpartition("/")[2]] = entry
        entries |= {prefix.rpartition("/")[2]: None for prefix in listed["common_prefixes"]}
        return entries


def _is_other(url: str) -> bool:
    return url.partition(":")[0] in ("node", *OTHER_SCHEMES)


_buckets: dict[str, Bucket] = {}
_lock = threading.Lock()


def bucket_at(url: str) -> Bucket:
    """Return the bucket at an address such as s3://name; one object per address."""
    with _lock:
        return _buckets.setdefault(url, Bucket(url))


def is_same_tag(tag: str | None, other: str | None) -> bool:
    """Return whether two entity tags are equal, with or without quotes and "W/"."""
    bare = [own.removeprefix("W/").strip('"') for own in (tag, other) if own is not None]
    return len(bare) == 2 and bare[0] == bare[1]


def quoted(etag: str | None) -> str | None:
    """Return an etag with quotes for a request; None for a weak tag, which never matches."""
    if etag is None or etag.startswith("W/"):
        return None
    return etag if etag.startswith('"') else f'"{etag}"'


def _is_denied(error: Exception) -> bool:
    is_named = type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    return is_named or "status code: 403" in str(error)[:2000]


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """Raise StoreError in place of obstore's errors, which have no common base."""
    try:
        yield
    except UnshardError:
        raise
    except Exception as error:  # noqa: BLE001
        raise failure(where, error) from None


def failure(where: str, error: Exception) -> StoreError:
    """Return the error for a failed request to a store; `where` is an address without secrets."""
    reason = _reason(error)
    variables = next((names for start, names in _VARIABLES.items() if where.startswith(start)), "")
    hint = f"check address, credentials, network and environment variables such as {variables}"
    if "NoSuchBucket" in reason or "ContainerNotFound" in reason:
        hint = f"check the name of the bucket, and environment variables such as {variables}, "
        hint += "which determine its store"
    elif reason == _WHOLE:
        hint = "use a server that supports range requests, or download the files"
    elif _is_other(where):
        hint = "check the address, and that it can be reached from here"
    return StoreError(f"{where}: {reason}", hint=hint)


def _reason(error: Exception) -> str:
    """Return why a request failed, without the error's own text, which may contain secrets."""
    text = str(error)
    words = [match[1].strip() for match in (_STATUS.search(text), _CODE.search(text)) if match]
    if words:
        return f"the store answers {', '.join(words)}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return f"the server answers {status}"  # the hub
    if odd := _ODD_KEY.search(text):
        return f"the key that begins with {odd[1]!r} cannot be a path: remove or rename it"
    for mark, reason in _KNOWN_REASONS.items():
        if mark in text:
            return reason
    return f"the request failed ({type(error).__name__})"
