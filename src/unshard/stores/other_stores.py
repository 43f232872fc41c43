"""Stores that are only read: web servers, by obstore, and the Hugging Face hub.

Both classes answer the two requests that a `Bucket` makes of obstore's clients, in their form. A
web server does not list its folders: in those that a user named, the files of known names are
looked for.
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

from unshard.stores.at_once import ahead

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
"""The number in the name of a rank's file that a user named."""
_STATUS = re.compile(r"status code: (\d{3})")
_ABSENT = ("401", "403", "404", "405", "410")
_THEN = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class Answer:
    """A range of a file, in blocks; what a client of obstore returns for a request."""

    blocks: Iterator[bytes]

    def stream(self, _least: int) -> Iterator[bytes]:
        """Return the blocks."""
        return self.blocks


class WebStore:
    """Reads the files of a web server; for several threads.

    Args:
        client: obstore's client of the server.
        given: the keys that a user named.
    """

    def __init__(self, client: "ObjectStore", given: AbstractSet[str]) -> None:
        self._client, self._given = client, given
        self._tags: set[str] = set()  # folders that a file in a given one names

    def list_with_delimiter(self, key: str) -> dict[str, list[Any]]:
        """Return what is known to be directly below a key: `objects` and `common_prefixes`."""
        start, folders = f"{key}/" if key else "", list[str]()
        below = {name[len(start) :] for name in self._given if name.startswith(start)}
        names = {name for name in below if name and "/" not in name}
        ranks = {_RANK.sub(r"\1{}", name) for name in names if _RANK.search(name)}
        if ranks or _INDEX in names or key in self._given or key in self._tags:
            names |= set(self._known_names(start, ranks))
            folders = self._tag(start)
        found = ahead(self._object, [start + name for name in sorted(names)])
        return {"objects": [one for one in found if one], "common_prefixes": folders}

    def get(self, key: str, *, options: "GetOptions") -> "GetResult":
        """Return a range of a file, on the conditions in the options."""
        return self._client.get(unquote(key), options=options)

    def _known_names(self, start: str, ranks: AbstractSet[str]) -> Iterator[str]:
        """Yield the names of files that a folder may have, those that an index names included."""
        yield from _KNOWN
        try:
            index = json.loads(self._read(start + _INDEX, most=_LONGEST_INDEX))
            named = {str(one) for one in index["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError):
            named = set()  # the reader finds what is wrong
        yield from sorted(one for one in named if "/" not in one)[:_MOST_NAMES]
        for pattern in (*_NUMBERED, *ranks):
            for name in self._in_a_row(start, pattern):
                yield name
                if pattern == _DCP:  # Megatron writes several per rank
                    yield from self._in_a_row(start, name.replace("_0.", "_{}."), begin=1)

    def _in_a_row(self, start: str, pattern: str, begin: int = 0) -> Iterator[str]:
        """Yield the names that a pattern has with ascending numbers, up to one that is missing."""
        names = (pattern.replace("{}", str(number)) for number in count(begin))
        return takewhile(lambda name: self._object(start + name) is not None, names)

    def _tag(self, start: str) -> list[str]:
        """Return the key of the folder that DeepSpeed's `latest` names, if there is one."""
        tag = self._read(start + _TAG, most=_LONGEST_TAG).decode(errors="replace").strip()
        if not tag or tag.startswith(".") or "/" in tag:
            return []
        self._tags.add(start + tag)
        return [start + tag]

    def _read(self, key: str, *, most: int) -> bytes:
        """Return a file; nothing if there is none, or if it has more than `most` bytes."""
        found = self._object(key)
        is_read = found is not None and found["size"] <= most
        return bytes(self._client.get(unquote(key)).bytes()) if is_read else b""

    def _object(self, key: str) -> dict[str, Any] | None:
        """Return what the server states of a file; None for a page, such as that of a folder."""
        for is_head in (True, False):  # some servers answer only GET
            try:
                answer = self._client.get(unquote(key), options={"head": is_head})
            except Exception as error:
                status = "".join(_STATUS.findall(str(error))[:1])
                if is_head and (status == "405" or "MissingContentLength" in str(error)):
                    continue
                if status in _ABSENT or isinstance(error, ValueError):  # no name of a file
                    return None
                raise
            is_page = str(answer.attributes.get("Content-Type", "")).startswith("text/html")
            return None if is_page else {**answer.meta, "path": key}
        return None


class HubStore:
    """Reads the repositories of a user of the Hugging Face hub; for several threads.

    Args:
        url: hf://user.
    """

    def __init__(self, url: str) -> None:
        from huggingface_hub import HfFileSystem

        self._user = url.removeprefix("hf://")
        self._files = HfFileSystem(skip_instance_cache=True)

    def list_with_delimiter(self, key: str) -> dict[str, list[Any]]:
        """Return what is directly below a key: `objects` and `common_prefixes`."""
        place, start = f"{self._user}/{key}", f"{key}/" if key else ""
        try:
            listed: list[Any] = self._files.ls(place, detail=True, refresh=True)
        except (FileNotFoundError, ValueError, NotImplementedError):  # above repositories
            listed = []
        found = [(start + one["name"].rpartition("/")[2], one) for one in listed]
        folders = [path for path, one in found if one["type"] == "directory"]
        objects = [
            {"path": path, "size": one["size"], "e_tag": one.get("blob_id"), "last_modified": _THEN}
            for path, one in found
            if one["type"] == "file" and one["name"] != place  # a file lists itself
        ]
        return {"objects": objects, "common_prefixes": folders}

    def get(self, key: str, *, options: Any) -> Answer:
        """Return a range of a file."""
        place, (start, end) = f"{self._user}/{key}", options["range"]
        blocks = ((at, min(at + _BLOCK, end)) for at in range(start, end, _BLOCK))
        return Answer(self._files.cat_file(place, *block) for block in blocks)
