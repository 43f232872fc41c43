"""Read-only stores: web servers, with obstore, and the Hugging Face hub.

Both classes have the two methods of obstore's clients that a `Bucket` calls. A web server does not
list its folders, so in the user's folders files with known names are requested.
"""

import json
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from unshard.stores.pool import ahead

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import ObjectStore


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
_LONGEST_TAG, _LONGEST_INDEX = 255, 1 << 28
_DCP = "__{}_0.distcp"
_NUMBERED = (
    _DCP,
    "zero_pp_rank_{}_mp_rank_00_model_states.pt",
    *(f"{kind}zero_pp_rank_{{}}_mp_rank_00_optim_states.pt" for kind in ("", "bf16_", "fp16_")),
)
"""Files of ranks, whose numbers begin at 0 and have no gap."""
_RANK = re.compile(r"(?<=rank)(_?)\d+(?=\.\w+$)")
"""The number in the name of a rank's file that a user passed."""
_STATUS = re.compile(r"status code: (\d{3})")
_ABSENT = ("401", "403", "404", "405", "410")
_THEN = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file, in blocks, with the interface of obstore's answers."""

    blocks: Iterator[bytes]

    def stream(self, _least: int) -> Iterator[bytes]:
        """Return the blocks."""
        return self.blocks


class WebStore:
    """Reads the files of a web server. Thread-safe.

    Args:
        client: obstore's client of the server.
        user_keys: the keys that a user passed.
    """

    def __init__(self, client: "ObjectStore", user_keys: AbstractSet[str]) -> None:
        self._client, self._user_keys = client, user_keys
        self._tags: set[str] = set()  # folders that DeepSpeed's `latest` names

    def list_with_delimiter(self, key: str) -> dict[str, list[Any]]:
        """Return the known `objects` and `common_prefixes` directly below a key."""
        start, folders = f"{key}/" if key else "", list[str]()
        below = {name[len(start) :] for name in self._user_keys if name.startswith(start)}
        names = {name for name in below if name and "/" not in name}
        ranks = {_RANK.sub(r"\1{}", name) for name in names if _RANK.search(name)}
        if ranks or _INDEX in names or key in self._user_keys or key in self._tags:
            names |= set(self._known_names(start, ranks))
            folders = self._tag(start)
        objects = ahead(self._object, [start + name for name in sorted(names)])
        return {"objects": list(filter(None, objects)), "common_prefixes": folders}

    def get(self, key: str, *, options: "GetOptions") -> "GetResult":
        """Return a range of a file, on the conditions in the options."""
        return self._client.get(unquote(key), options=options)

    def _known_names(self, start: str, ranks: AbstractSet[str]) -> Iterator[str]:
        """Yield the names of files that a folder may have, including those in an index."""
        yield from _KNOWN
        try:
            index = json.loads(self._read(start + _INDEX, most=_LONGEST_INDEX))
            names = {str(name) for name in index["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError):
            names = set()  # the reader of the index reports the error
        yield from sorted(name for name in names if "/" not in name)[:_MOST_NAMES]
        for pattern in (*_NUMBERED, *ranks):
            for name in self._numbered(start, pattern):
                yield name
                if pattern == _DCP:  # Megatron writes several files per rank
                    yield from self._numbered(start, name.replace("_0.", "_{}."), begin=1)

    def _numbered(self, start: str, pattern: str, begin: int = 0) -> Iterator[str]:
        """Yield the names of a pattern with ascending numbers, up to the first missing file."""
        names = (pattern.replace("{}", str(number)) for number in count(begin))
        return takewhile(lambda name: self._object(start + name) is not None, names)

    def _tag(self, start: str) -> list[str]:
        """Return the key of the folder in DeepSpeed's `latest`, if there is one."""
        tag = self._read(start + _TAG, most=_LONGEST_TAG).decode(errors="replace").strip()
        if not tag or tag.startswith(".") or "/" in tag:
            return []
        self._tags.add(start + tag)
        return [start + tag]

    def _read(self, key: str, *, most: int) -> bytes:
        """Return a file's bytes; empty if it is missing or has more than `most` bytes."""
        meta = self._object(key)
        is_read = meta is not None and meta["size"] <= most
        return bytes(self._client.get(unquote(key)).bytes()) if is_read else b""

    def _object(self, key: str) -> dict[str, Any] | None:
        """Return the server's metadata of a file; None for an HTML page, such as a folder's."""
        for is_head in (True, False):  # some servers answer only GET
            try:
                answer = self._client.get(unquote(key), options={"head": is_head})
            except Exception as error:
                status = "".join(_STATUS.findall(str(error))[:1])
                if is_head and (status == "405" or "MissingContentLength" in str(error)):
                    continue
                if status in _ABSENT or isinstance(error, ValueError):  # an invalid name
                    return None
                raise
            is_page = str(answer.attributes.get("Content-Type", "")).startswith("text/html")
            return None if is_page else {**answer.meta, "path": key}
        return None


class HubStore:
    """Reads the repositories of a user of the Hugging Face hub. Thread-safe.

    Args:
        url: hf://user.
    """

    def __init__(self, url: str) -> None:
        from huggingface_hub import HfFileSystem

        self._user = url.removeprefix("hf://")
        self._files = HfFileSystem(skip_instance_cache=True)

    def list_with_delimiter(self, key: str) -> dict[str, list[Any]]:
        """Return the `objects` and `common_prefixes` directly below a key."""
        folder, start = f"{self._user}/{key}", f"{key}/" if key else ""
        try:
            listed: list[Any] = self._files.ls(folder, detail=True, refresh=True)
        except (FileNotFoundError, ValueError, NotImplementedError):  # above repositories
            listed = []
        objects, folders = [], []
        for item in listed:
            path, tag = start + item["name"].rpartition("/")[2], item.get("blob_id")
            if item["type"] == "directory":
                folders.append(path)
            elif item["type"] == "file" and item["name"] != folder:  # a file lists itself
                entry = {"path": path, "size": item["size"], "e_tag": tag, "last_modified": _THEN}
                objects.append(entry)
        return {"objects": objects, "common_prefixes": folders}

    def get(self, key: str, *, options: Any) -> FileRange:
        """Return a range of a file."""
        path, (start, end) = f"{self._user}/{key}", options["range"]
        blocks = ((at, min(at + _BLOCK, end)) for at in range(start, end, _BLOCK))
        return FileRange(self._files.cat_file(path, *block) for block in blocks)
