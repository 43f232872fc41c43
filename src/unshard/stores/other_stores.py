"""What obstore does not know, read by fsspec: web servers, the hub, SSH, and whatever it has more.

`OtherStore` answers the two requests that a `Bucket` makes of obstore's clients, in their form. Web
servers have no listings: the page of a folder is taken for one if it has links to what is in it;
else the files of known names are looked for, in the folders that a user named.
"""

import json
import os
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from unshard.errors import StoreError, UsageError, how_to_install
from unshard.stores.at_once import ahead

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

OTHER_SCHEMES = ("http", "https", "hf", "memory", "sftp", "ftp", "smb", "webdav", "hdfs")

_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub", "sftp": "paramiko"}
_BLOCK = 4 << 20
_INDEX = "model.safetensors.index.json"
_MOST_NAMES = 100_000
_KNOWN = (
    *(".metadata", _INDEX, "model.safetensors", "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja"),
    *("preprocessor_config.json", "adapter_config.json", "adapter_model.safetensors"),
    *("unshard.json", "fsdp_config.json"),
    *("common.pt", "metadata.json"),  # Megatron
    *("latest", "mp_rank_00_model_states.pt"),  # DeepSpeed
)
_TAG = "latest"
_LONGEST_TAG = 255
_DCP = "__{}_0.distcp"
_NUMBERED = (
    _DCP,
    "zero_pp_rank_{}_mp_rank_00_model_states.pt",
    *(f"{kind}zero_pp_rank_{{}}_mp_rank_00_optim_states.pt" for kind in ("", "bf16_", "fp16_")),
)
"""Files of ranks, whose numbers begin at 0 and have no gap."""


class PreconditionError(Exception):
    """An object is not the one that was asked for; obstore's error has this name, too."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A range of a file, in blocks; what a client of obstore returns for a request."""

    blocks: Iterator[bytes]

    def stream(self, _least: int) -> Iterator[bytes]:
        """Return the blocks."""
        return self.blocks


class OtherStore:
    """Reads what is at an address of fsspec; for several threads.

    Args:
        url: the address of the "bucket", such as https://host:port.
        given: the keys that a user named.
    """

    def __init__(self, url: str, given: AbstractSet[str]) -> None:
        self._url, self._given = url, given
        self._scheme = url.partition(":")[0]
        self._tags: set[str] = set()  # folders that a file in a given one names
        self._system: tuple[int, AbstractFileSystem] | None = None

    def list_with_delimiter(self, key: str) -> dict[str, list[Any]]:
        """Return what is directly below a key: `objects` and `common_prefixes`."""
        found = self._names_of(key)
        start = f"{key}/" if key else ""
        named = (name for name in self._given if name.startswith(start))
        files = {name for name, is_folder in found.items() if not is_folder}
        files |= {name[len(start) :] for name in named if name and "/" not in name[len(start) :]}
        keys = [start + name for name in sorted(files) if name]
        objects = [one for one in ahead(self._object, keys) if one is not None]
        folders = [start + name for name, is_folder in found.items() if is_folder]
        return {"objects": objects, "common_prefixes": folders}

    def get(self, key: str, options: dict[str, Any]) -> Answer:
        """Return a range of an object.

        Raises:
            FileNotFoundError: there is none.
            PreconditionError: it is not the one whose ETag is in the options.
        """
        start, end = options["range"]
        return Answer(self._blocks(key, start, end, options["if_match"]))

    def _blocks(self, key: str, start: int, end: int, etag: str | None) -> Iterator[bytes]:
        is_web = self._scheme in ("http", "https")
        more = {"headers": {"If-Match": etag}} if is_web and etag else {}
        for begin in range(start, end, _BLOCK):
            last = min(begin + _BLOCK, end)
            try:
                data = self._files().cat_file(self._at(key), start=begin, end=last, **more)
            except Exception as error:
                if getattr(error, "status", 0) == 412:
                    raise PreconditionError from error
                raise
            if len(data) > last - begin:
                raise StoreError(
                    f"{self._url}/{key}: the server sends the whole file for a part of it",
                    hint="use a server that answers requests for ranges, or download the files",
                )
            yield data

    def _names_of(self, key: str) -> dict[str, bool]:
        """Return the names in a folder, and whether each is a folder itself."""
        try:
            listed = self._files().ls(self._at(key) + "/", detail=True)
        except (FileNotFoundError, NotADirectoryError):
            listed = []
        except Exception as error:
            if getattr(error, "status", 0) not in (401, 403, 405):
                raise
            listed = []
        names = {self._name_of(one["name"], key): one["type"] == "directory" for one in listed}
        names = {name: folder for name, folder in names.items() if name}
        is_web = self._scheme in ("http", "https")
        if not names and is_web and (key in self._given or key in self._tags):
            return dict.fromkeys(self._known_names(key), False) | self._tag(key)
        return names

    def _tag(self, key: str) -> dict[str, bool]:
        """Return the folder that DeepSpeed's `latest` names, as a folder; nothing without one."""
        found = self._object(f"{key}/{_TAG}")
        if found is None or found["size"] > _LONGEST_TAG:
            return {}
        tag = self._files().cat_file(self._at(f"{key}/{_TAG}")).decode(errors="replace").strip()
        if not tag or tag.startswith(".") or set("/?#") & set(tag):
            return {}
        self._tags.add(f"{key}/{tag}")
        return {tag: True}

    def _name_of(self, listed: str, key: str) -> str:
        """Return the name of what a listing has; "" if it is not directly in the folder."""
        name = listed.rstrip("/")
        if self._scheme in ("http", "https"):
            start = self._at(key) + "/"
            name = unquote(name[len(start) :]) if unquote(name).startswith(start) else "/"
            return "" if set("/?#") & set(name) else name
        return name.rpartition("/")[2]

    def _known_names(self, key: str) -> Iterator[str]:
        """Yield the names of files that a folder may have, those that an index names included."""
        yield from _KNOWN
        if self._object(f"{key}/{_INDEX}"):
            data = self._files().cat_file(self._at(f"{key}/{_INDEX}"))
            try:
                named = {str(one) for one in json.loads(data)["weight_map"].values()}
            except (ValueError, KeyError, TypeError, AttributeError):
                named = set()  # the reader finds what is wrong
            yield from sorted(one for one in named if "/" not in one)[:_MOST_NAMES]
        for pattern in _NUMBERED:
            for name in self._in_a_row(key, pattern):
                yield name
                if pattern == _DCP:  # Megatron writes several per rank
                    yield from self._in_a_row(key, name.replace("_0.", "_{}."), begin=1)

    def _in_a_row(self, key: str, pattern: str, begin: int = 0) -> Iterator[str]:
        """Yield the names that a pattern has with ascending numbers, up to one that is missing."""
        names = map(pattern.format, count(begin))
        return takewhile(lambda name: self._object(f"{key}/{name}") is not None, names)

    def _object(self, key: str) -> dict[str, Any] | None:
        try:
            info = self._files().info(self._at(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            if getattr(error, "status", 0) not in (401, 403, 404, 405, 410):
                raise
            return None
        if info.get("type") == "directory":
            return None
        if info.get("size") is None:
            raise StoreError(f"{self._url}/{key}: the server does not state how long it is")
        etag = info.get("ETag") or info.get("etag") or info.get("blob_id")
        return {
            "path": key,
            "size": info["size"],
            "e_tag": etag,
            "last_modified": _time_of(info),
        }

    def _at(self, key: str) -> str:
        return f"{self._url}/{key}".rstrip("/")

    def _files(self) -> "AbstractFileSystem":
        if self._system is None or self._system[0] != os.getpid():  # its threads are not forked
            self._system = os.getpid(), _opened(self._url, self._scheme)
        return self._system[1]


def _opened(url: str, scheme: str) -> "AbstractFileSystem":
    try:
        import fsspec

        settings = {} if scheme == "memory" else {"use_listings_cache": False}
        system, _ = fsspec.core.url_to_fs(f"{url}/", **settings)
    except (ImportError, ValueError):
        packages = " ".join(["fsspec", *filter(None, [_PACKAGES.get(scheme)])])
        raise UsageError(
            f"{url}: reading from there needs {packages.replace(' ', ' and ')}, which is missing",
            hint=how_to_install(packages, "remote"),
        ) from None
    return system


def _time_of(info: dict[str, Any]) -> datetime:
    """Return when a file was last written; 1970 if that is not known."""
    for field in ("Last-Modified", "last_modified", "mtime", "created"):
        found = info.get(field)
        if isinstance(found, datetime):
            return found
        if isinstance(found, int | float):
            return datetime.fromtimestamp(found, UTC)
        if isinstance(found, str):
            return parsedate_to_datetime(found)
    return datetime.fromtimestamp(0, UTC)
