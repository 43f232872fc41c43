"""Headers of safetensors files, and JSON, that break the rules of their formats."""

import json
from struct import pack

from unshard.containers.json_file import MAX_JSON_DEPTH
from unshard.containers.safetensors_file import MAX_HEADER

__all__ = [
    "BAD_JSON",
    "CORRUPT",
    "DIGITS",
    "INCOMPLETE",
    "ONE",
    "STRICTER",
    "container",
    "nested",
    "tensor",
]

DIGITS = b"12345678"


def container(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file of a header (JSON, or bytes as they are) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return pack("<Q", len(text) if length is None else length) + text + data


def tensor(
    code: object = "U8", shape: object = (4,), offsets: object = (0, 4)
) -> dict[str, object]:
    return {"dtype": code, "shape": shape, "data_offsets": offsets}


ONE = b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'

INCOMPLETE: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\x02" + bytes(6),
    "truncated header": container({"a": tensor()})[:20],
    "no header": pack("<Q", 10),
    "no data": container({"a": tensor()}),
    "a byte of data missing": container({"a": tensor()}, b"123"),
}

CORRUPT: dict[str, bytes] = {
    "header of 2**63 bytes": container({"a": tensor()}, length=2**63),
    "header longer than any": container({"a": tensor()}, length=MAX_HEADER + 1),
    "header of no bytes": container(b"", b"1234"),
    "bomb of lists": container(b'{"a":[' + b"[]," * 1_000_000 + b"0]}"),
    "not JSON": container(b"{hello}"),
    "JSON and more": container(b'{"a":' + ONE + b"}x", b"1234"),
    "not UTF-8": container(b'{"\xff":' + ONE + b"}", b"1234"),
    "byte order mark": container(b"\xef\xbb\xbf{}"),
    "list": container([]),
    "text": container("a"),
    "nested dicts": container(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "nested lists": container(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "same name, other data": container(
        b'{"a":' + ONE + b',"a":' + ONE.replace(b"[0,4]", b"[4,8]") + b"}", DIGITS
    ),
    "dtype twice": container(b'{"a":' + ONE.replace(b"{", b'{"dtype":"U8",') + b"}", b"1234"),
    "hole": container({"a": tensor(), "b": tensor(offsets=(5, 9))}, DIGITS + b"9"),
    "hole at the start": container({"a": tensor(offsets=(4, 8))}, DIGITS),
    "overlap": container({"a": tensor(), "b": tensor(offsets=(2, 6))}, b"123456"),
    "two tensors in one place": container({"a": tensor(), "b": tensor()}, b"1234"),
    "trailing bytes": container({"a": tensor()}, b"12345"),
    "trailing bytes and no tensor": container({}, b"1"),
    "unknown dtype": container({"a": tensor("X8")}, b"1234"),
    "dtype in small letters": container({"a": tensor("u8")}, b"1234"),
    "dtype a number": container({"a": tensor(8)}, b"1234"),
    "dtype null": container({"a": tensor(None)}, b"1234"),
    "negative shape": container({"a": tensor(shape=(-2, -2))}, b"1234"),
    "bool in shape": container({"a": tensor(shape=(True, 4))}, b"1234"),
    "float in shape": container({"a": tensor(shape=(4.0,))}, b"1234"),
    "shape no list": container({"a": tensor(shape=4)}, b"1234"),
    "shape beyond 64 bits": container({"a": tensor(shape=(2**32, 2**32, 4))}, b"1234"),
    "size beyond 64 bits": container({"a": tensor(shape=(2**64 + 4,))}, b"1234"),
    "no elements beyond 64 bits": container({"a": tensor(shape=(2**40, 2**40, 0), offsets=(0, 0))}),
    "shape of 5,400 digits": container({"a": tensor(shape=(10**18,) * 300)}, b"1234"),
    "shape and bytes differ": container({"a": tensor("I16")}, b"1234"),
    "offsets reversed": container({"a": tensor(offsets=(4, 0))}, b"1234"),
    "negative offset": container({"a": tensor(offsets=(-4, 0))}),
    "bools as offsets": container({"a": tensor(shape=(1,), offsets=(False, True))}, b"1"),
    "floats as offsets": container({"a": tensor(offsets=(0.0, 4.0))}, b"1234"),
    "three offsets": container({"a": tensor(offsets=(0, 4, 4))}, b"1234"),
    "no shape": container({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, b"1234"),
    "entry no object": container({"a": [0, 4]}, b"1234"),
    "NaN": container(b'{"a":' + ONE.replace(b"}", b',"x":NaN}') + b"}", b"1234"),
    "metadata a text": container({"__metadata__": "x"}),
    "metadata of numbers": container({"__metadata__": {"a": 1}}),
    "metadata nested": container({"__metadata__": {"a": {"b": "c"}}}),
    "half a surrogate pair as name": container(b'{"\\ud800":' + ONE + b"}", b"1234"),
    "half a surrogate pair as metadata": container(b'{"__metadata__":{"a":"\\ud800"}}'),
}

# What safetensors itself lets pass: of two equal names it takes one in silence.
STRICTER: dict[str, bytes] = {
    "same name, same data": container(b'{"a":' + ONE + b',"a":' + ONE + b"}", b"1234"),
    "space before the header": container(b' {"a":' + ONE + b"}", b"1234"),
    "metadata null": container({"__metadata__": None}),
    "elements of four bits": container({"a": tensor("F4", (8,))}, b"1234"),
}


def nested(depth: int) -> dict[str, object]:
    """Return objects and lists inside one another, `depth` of them in all."""
    fields: object = {}
    for level in range(depth - 2):
        fields = [fields] if level % 2 else {"below": fields}
    return {"top": fields}


BAD_JSON = {
    "cut": (b'{"a": 1', "is not valid JSON: "),
    "empty": (b"", "is not valid JSON: "),
    "a list": (b"[]", "is not a JSON object"),
    "latin-1": (b'{"a": "\xe9"}', "is not UTF-8, at byte 7"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "is not UTF-8, at byte 0"),
    "two keys": (b'{"a": {"k": 1, "b": 2, "k": 3}}', "the key 'k' occurs twice"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "a number of too many digits"),
    "half a pair": (b'{"a": ["\\ud800"]}', ": a: half a surrogate pair"),
    "half a pair as a key": (b'{"a": {"\\ud800": 1}}', ": a: half a surrogate pair"),
    "deep": (json.dumps(nested(MAX_JSON_DEPTH + 1)).encode(), "top: nested too deep"),
    "900 deep": (json.dumps(nested(900)).encode(), "top: nested too deep"),
    "a bomb of lists": (b'{"a": [' + b"[]," * 1_000_000 + b"0]}", "too many values"),
    "a bomb of objects": (b'{"a": [' + b'{"":0},' * 1_000_000 + b"0]}", "too many values"),
    "deeper than the stack": (b'{"a": ' + b"[" * 100_000, "nested too deep"),
}
"""Texts that are not a JSON object as it is taken, each with a part of what its error says."""
