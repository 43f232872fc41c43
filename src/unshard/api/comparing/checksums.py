"""`checksums`: compute the SHA-256 of each tensor of a merge without merging; read such files.

The schema is that of vLLM's weight checker, `POST /weight_checker` (vllm-project/vllm#51350, still
open in November 2026): {"checksums": {name: hex}} answers {"action": "checksum"}, and the same
mapping is the "baseline" of {"action": "compare"}. Its values are the SHA-256 of the contiguous
bytes of a parameter. vLLM's names begin with the ranks ("dp0:pp0:pcp0:tp0:ep0:"), and projections
that vLLM fuses are one parameter.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Unpack

from unshard.api.comparing.models import open_models
from unshard.api.options import MergeOptions, accepting
from unshard.console import listener_or_default
from unshard.containers.json_file import parsed_object
from unshard.containers.open_files import read_whole
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import shape_of
from unshard.engines.checksums import digest_contents
from unshard.engines.spooling import size_of
from unshard.engines.threads import Resources
from unshard.errors import UsageError
from unshard.keywords import ChecksumKeywords
from unshard.plan.pieces import contents_of_tensor
from unshard.progress import Listener, Stage
from unshard.stores.nodes.connection import disconnecting
from unshard.write.verification.comparison import Comparison, TensorComparison

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_EXPECTED = 'lines of a SHA-256 and a name, or JSON: {"checksums": {name: SHA-256}}'
_HINT = "`unshard checksums CHECKPOINT` prints them"
_RANKS = re.compile(r"dp\d+:pp\d+:(?:pcp\d+:)?tp(\d+):ep(\d+):")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused parameters of vLLM, and their tensors, which are concatenated along dimension 0."""


@accepting(ChecksumKeywords)
@disconnecting()
def checksums(
    checkpoint: str | Path,
    *,
    listener: Listener | None = None,
    **options: Unpack[ChecksumKeywords],
) -> dict[str, str]:
    """Return the SHA-256 of each tensor that a merge would write, by name; nothing is written.

    Args:
        checkpoint: as for `merge`; also a merged model.
        listener: as for `merge`.
        options: as for `merge`.

    Returns:
        Hexadecimal digests of the bytes of each tensor, row-major and little-endian, sorted by
        name.

    Raises:
        UnshardError: as `merge` raises it before it writes; or a file has changed meanwhile.
    """
    chosen = MergeOptions(**options)
    with (
        listener_or_default(listener) as heard,
        open_models([checkpoint], chosen, heard) as (model,),
    ):
        tensors = {name: [one] for name, one in model.tensors.items()}
        path = model.checkpoint.location.weights_dir
        return _digest(tensors, path, chosen.resources, heard)


def compare_checksums(
    tensors: Sequence[ConvertedTensor], file: Path, resources: Resources, listener: Listener
) -> Comparison:
    """Compare tensors with the checksums in a file.

    Raises:
        UsageError: the file has no checksums, or checksums of parts of tensors.
        CorruptError: the file is damaged JSON; or a weight file is gone, or ends early.
    """
    wanted = read_checksums(file)
    parts = _fused({tensor.name: tensor for tensor in tensors}, wanted)
    digests = _digest(parts, file, resources, listener)
    compared = (
        TensorComparison(
            name,
            *(parts[name][0].dtype.name,) * 2,
            *(shape_of(parts[name][0].recipe),) * 2,
            cast=False,
            equal=digest == wanted[name],
            values=None,
        )
        for name, digest in digests.items()
        if name in wanted
    )
    missing, unexpected = wanted.keys() - digests.keys(), digests.keys() - wanted.keys()
    return Comparison(0.0, 0.0, tuple(compared), tuple(sorted(missing)), tuple(sorted(unexpected)))


def read_checksums(path: Path) -> dict[str, str]:
    """Return the checksums in a file, by the names of the tensors.

    The file has lines of `sha256sum`, or JSON: `unshard.json`, the output of
    `unshard checksums --json`, or the answer of vLLM's weight checker.

    Raises:
        UsageError, CorruptError: as by `compare_checksums`.
    """
    try:
        text = path.read_bytes() if path.is_fifo() else read_whole(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", hint=_HINT) from error
    lines = text.decode("utf-8-sig", errors="replace").splitlines()
    if lines and lines[0].lstrip().startswith("{"):
        sums = parsed_object(text, str(path)).get("checksums")
        lines = (
            [f"{digest}  {name}" for name, digest in sums.items()] if isinstance(sums, dict) else []
        )
    checksums: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if not line.strip() or line.startswith("#"):
            continue
        if match is None:
            raise UsageError(
                f"{path}, line {number}: is not a checksum of a tensor",
                expected=_EXPECTED,
                hint=_HINT,
            )
        ranks = _RANKS.match(match[2])
        if ranks is not None and ranks.groups() != ("0", "0"):
            raise UsageError(
                f"{path}: {match[2]} is a part of a tensor, which no checkpoint has",
                hint="ask an engine without tensor and expert parallelism",
            )
        name = match[2] if ranks is None else match[2][ranks.end() :]
        if checksums.setdefault(name, match[1].lower()) != match[1].lower():
            raise UsageError(f"{path}: two ranks have different values of {name}")
    if not checksums:
        raise UsageError(f"{path}: has no checksums", expected=_EXPECTED, hint=_HINT)
    return checksums


def _digest(
    tensors: Mapping[str, Sequence[ConvertedTensor]],
    path: Path,
    resources: Resources,
    listener: Listener,
) -> dict[str, str]:
    """Return the checksums of tensors, or of concatenated tensors, sorted by name."""
    listener(Stage("hashing", sum(map(size_of, chain.from_iterable(tensors.values())))))
    contents = ((name, [*map(contents_of_tensor, parts)]) for name, parts in tensors.items())
    return dict(sorted(digest_contents(contents, path, resources, listener).items()))


def _fused(
    tensors: Mapping[str, ConvertedTensor], wanted: Collection[str]
) -> Mapping[str, Sequence[ConvertedTensor]]:
    """Return tensors by name; parts of a fused tensor in `wanted` are listed under its name."""
    by_name: dict[str, Sequence[ConvertedTensor]] = {name: [one] for name, one in tensors.items()}
    for name in wanted:
        whole = next((fused for fused in _FUSED if f".{fused}." in name), "")
        parts = [name.replace(whole, part) for part in _FUSED.get(whole, ())]
        if parts and name not in tensors and all(part in tensors for part in parts):
            by_name[name] = [tensors[part] for part in parts]
            for part in parts:
                del by_name[part]
    return by_name
