"""Buckets: what is in them, and ranges of their objects, by obstore.

Knows listings, gets and errors of stores; knows no formats. Credentials, endpoints and regions are
found by obstore: in the environment, or from the machine. No message contains anything that a
store or obstore says in its own words, as that may be a key, a token or a signed address.
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
from unshard.stores import OTHER_SCHEMES
from unshard.stores.changes import changed, gone
from unshard.stores.nodes.files import Copy
from unshard.stores.nodes.store import NodeStore
from unshard.stores.other_stores import Answer, HubStore, WebStore

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_CUT_RETRIES = 3
"""How often the rest of a body is asked for again that ended early; requests are retried below."""
_REQUEST_RETRIES = 10
_SILENT = "30s"  # after which a web server that sends nothing is asked again, for three minutes
_STREAMED = 1 << 20
_STAT_FIELDS = 10

_STATUS = re.compile(r"status code: (\d{3} [A-Z][A-Za-z ]*)")
_ODD_KEY = re.compile(r'with invalid path: [^"]*"([^"\n]{1,999})"')
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_CUT, _LATE = "the connection was cut", "it did not answer in time"
_WHOLE = "the server sends the whole file for a part of it"
_KNOWN_REASONS = {
    "ConnectionRefused": "the connection was refused",
    "dns error": "its host name is not known",
    "TimedOut": _LATE,
    "timed out": _LATE,
    "certificate": "its certificate is not accepted",
    "IncompleteMessage": _CUT,
    "ConnectionReset": _CUT,
    "kind: Decode": _CUT,
    "kind: Body": _CUT,
    "kind: Connect": "no connection could be made",
    "builder error": "the endpoint cannot be used: http:// needs AWS_ALLOW_HTTP=true (or AZURE_…)",
    "Range request not supported": _WHOLE,
    "MissingContentLength": "the server does not state how long a file is",
    "OpenCredentials": "the file with the credentials cannot be read",
    "DecodeCredentials": "the file with the credentials is not one",
    "InvalidAccessKey": "AZURE_STORAGE_ACCOUNT_KEY is not a key",
    "MissingAccount": "no account is given: set AZURE_STORAGE_ACCOUNT_NAME",
    "credential": "no credentials were found",
}
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "a": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""What decides how a store is reached, by the beginning of its addresses."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An object, as its listing states it.

    Attributes:
        size: bytes.
        etag: changes with the content; None if the store has none.
        modified: when it was last written, nanoseconds since 1970.
        copies: where it is, if nodes have it.
    """

    size: int
    etag: str | None
    modified: int
    copies: tuple[Copy, ...] = ()

    @property
    def status(self) -> os.stat_result:
        """The same as of a file; another object in its place has another inode and device."""
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
        """Return whether an answer is about this object, as far as it tells."""
        tag = answer["e_tag"]
        if tag is not None and self.etag is not None:
            return is_same_tag(tag, self.etag)
        seconds = int(answer["last_modified"].timestamp())  # 0 if the answer has no time
        return answer["size"] == self.size and seconds in (0, self.modified // 10**9)


def client(url: str) -> "ObjectStore":
    """Return obstore's client of a bucket.

    Raises:
        UsageError: obstore is not installed.
        StoreError: the address or its configuration is not accepted.
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
    """What is in a bucket: listings are asked for once, until they are forgotten. Thread-safe.

    Keys have no slash at their ends; "" is the bucket itself.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.RLock()
        self._store: ObjectStore | None = None
        self._other: WebStore | HubStore | NodeStore | None = None
        self._listings: dict[str, dict[str, Entry | None]] = {}
        self._given: set[str] = set()

    @property
    def store(self) -> "ObjectStore":
        """Obstore's client.

        Raises:
            UsageError: obstore does not know such addresses: they are only read.
        """
        if _is_other(self.url):
            raise UsageError(
                f"{self.url}: nothing can be written there",
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
                self._other = NodeStore(self.url, self._given)
            elif self._other is None and self.url.startswith("hf:"):
                self._other = HubStore(self.url)
            elif self._other is None:
                self._other = WebStore(client(self.url), self._given)
            return self._other

    def forget(self, given: str | None = None) -> None:
        """Forget all listings.

        `given` is a key that a user named: folders above it may be denied. The environment may
        have changed since the last one was: it is read again.
        """
        with self._lock:
            self._listings.clear()
            if given is not None:
                self._given.add(given)
                self._store = self._other = None

    def children(self, key: str) -> dict[str, Entry | None]:
        """Return what is directly below a key, by name: objects, and None for each folder.

        Raises:
            StoreError: the store cannot be reached, or does not allow it.
        """
        with self._lock:
            found = self._listings.get(key)
            if found is None:
                found = self._listings[key] = self._list(key)
            return found

    def entry(self, key: str) -> Entry | None:
        """Return the object of this key, or None if there is none.

        Raises:
            StoreError: as for `children`.
        """
        parent, _, name = key.rpartition("/")
        return self.children(parent).get(name) if key else None

    def entry_to_read(self, key: str) -> Entry | None:
        """Return what `entry` does, for an object that is about to be read.

        Raises:
            StoreError: as for `children`.
            CorruptError: several nodes have it, and not the same.
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
        known = self._is_folder_as_listed(key)
        if known or (known is False and not _is_other(self.url)):  # others may list a part only
            return known
        return bool(self.children(key)) or not key

    def _is_folder_as_listed(self, key: str) -> bool | None:
        """Return whether a key is a folder by what was listed above it; None if nothing was.

        An empty listing tells nothing: it may have been denied.
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

    def chunks(self, key: str, entry: Entry, start: int, length: int) -> Iterator[memoryview]:
        """Yield an object's bytes from `start` on, as they arrive; a cut answer is continued.

        Raises:
            CorruptError: the object is gone, or is not the one that was listed.
            StoreError: the store cannot be reached, or does not allow it.
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

    def _get(self, key: str, entry: Entry, start: int, length: int) -> "GetResult | Answer":
        store = self._readable()
        try:
            if isinstance(store, NodeStore):
                return store.get(key, entry.copies, start, start + length)
            options: GetOptions = {"range": (start, start + length)}
            if etag := quoted(entry.etag):
                options["if_match"] = etag
            answer = store.get(key, options=options)
            if not isinstance(answer, Answer) and not entry.is_of(answer.meta):
                raise changed(f"{self.url}/{key}")  # noqa: TRY301 (it ignores If-Match)
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

    def _list(self, key: str) -> dict[str, Entry | None]:
        store = self._readable()
        for tries_left in reversed(range(1 + _CUT_RETRIES)):
            try:
                listed = store.list_with_delimiter(key)
                break
            except UnshardError:
                raise
            except Exception as error:  # noqa: BLE001 (obstore's errors have no common base)
                if _is_denied(error) and self._is_above_given(key):
                    return {}  # who may read one folder need not be allowed to list those above
                if not tries_left or _reason(error) != _CUT:
                    raise failure(f"{self.url}/{key}".rstrip("/"), error) from None
        found: dict[str, Entry | None] = {}
        for one in listed["objects"]:
            modified = int(one["last_modified"].timestamp() * 1e9)
            copies: Any = one.get("copies", ())
            entry = Entry(one["size"], one["e_tag"], modified, copies)
            found[one["path"].rpartition("/")[2]] = entry
        found |= {prefix.rpartition("/")[2]: None for prefix in listed["common_prefixes"]}
        return found

    def _is_above_given(self, key: str) -> bool:
        start = f"{key}/" if key else ""
        return any(given != key and given.startswith(start) for given in self._given)


def _is_other(url: str) -> bool:
    return url.partition(":")[0] in ("node", *OTHER_SCHEMES)


_buckets: dict[str, Bucket] = {}
_lock = threading.Lock()


def bucket_at(url: str) -> Bucket:
    """Return the bucket at an address such as s3://name: always the same one for an address."""
    with _lock:
        return _buckets.setdefault(url, Bucket(url))


def is_same_tag(tag: str | None, other: str | None) -> bool:
    """Return whether two entity tags are the same, as answers and listings may spell them."""
    bare = [one.removeprefix("W/").strip('"') for one in (tag, other) if one is not None]
    return len(bare) == 2 and bare[0] == bare[1]


def quoted(etag: str | None) -> str | None:
    """Return an etag as requests have it, quoted; None if it is weak, which matches nothing."""
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
    """Return the error that a request to a store failed; `where` is an address without secrets."""
    reason = _reason(error)
    variables = next((names for start, names in _VARIABLES.items() if where.startswith(start)), "")
    hint = "check address, credentials and network: environment variables such as "
    hint += f"{variables} are read"
    if "NoSuchBucket" in reason or "ContainerNotFound" in reason:
        hint = f"check the name of the bucket, and environment variables such as {variables}, "
        hint += "which decide where it is looked for"
    elif reason == _WHOLE:
        hint = "use a server that answers requests for ranges, or download the files"
    elif _is_other(where):
        hint = "check the address, and whether it can be reached from here"
    return StoreError(f"{where}: {reason}", hint=hint)


def _reason(error: Exception) -> str:
    """Return why a request failed, in our own words: theirs may contain secrets."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status or code:
        words = [status[1].strip()] if status else []
        words += [code[1]] if code else []
        return f"the store answers {', '.join(words)}"
    if isinstance(answered := getattr(getattr(error, "response", None), "status_code", None), int):
        return f"the server answers {answered}"  # the hub
    if odd := _ODD_KEY.search(text):
        return f"no path can have the key that begins with {odd[1]!r}: remove it, or rename it"
    for mark, reason in _KNOWN_REASONS.items():
        if mark in text:
            return reason
    return f"the request failed ({type(error).__name__})"
