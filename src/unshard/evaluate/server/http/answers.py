"""Answers that can be large are serialised where they are made, so that few exist at a time.

FastAPI would serialise them later, in another thread. One answer per request would wait for that,
as objects, which take several times the memory of their JSON.
"""

import json
from collections.abc import Iterator

from fastapi import Response
from pydantic import BaseModel

__all__ = ["answer", "page"]

_PAGE_BYTES = 1 << 20
_JSON = "application/json"


def answer(view: BaseModel) -> Response:
    """Return a view as an answer."""
    return Response(view.model_dump_json(), media_type=_JSON)


def page(name: str, entries: Iterator[tuple[str | int, BaseModel]], limit: int) -> Response:
    """Return the first page of a list: `{name: [...], "next": PLACE or null}`.

    Args:
        name: the name of the list.
        entries: the place of each entry, from which a client can continue, and its view.
        limit: the most entries. A page also ends after 1 MiB.
    """
    written, size, last, after = list[str](), 0, None, None
    for place, view in entries:
        if len(written) == limit or size > _PAGE_BYTES:
            after = last
            break
        written.append(view.model_dump_json())
        size, last = size + len(written[-1]), place
    listed = ",".join(written)
    return Response(f'{{"{name}":[{listed}],"next":{json.dumps(after)}}}', media_type=_JSON)
