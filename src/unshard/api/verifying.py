"""`verify`: a merged model compared with what it was merged from, or with another model."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Unpack, cast

from unshard.api.comparing.checksums import compare_checksums
from unshard.api.converting import convert, expected_names, find_stored_ties
from unshard.api.options import MergeOptions, accepting, given_path
from unshard.api.sources import Sources, inflated, read_checkpoint
from unshard.containers.json_file import JsonFields, json_object
from unshard.convert.outputs import Converted, precision
from unshard.convert.quantised import is_scale
from unshard.engines.compare import compare
from unshard.engines.crew import engine_for
from unshard.errors import UsageError
from unshard.keywords import OPTIONS, DtypeLike, MergeKeywords, Names, VerifyKeywords
from unshard.plan.work import as_stored
from unshard.progress import Chosen, Listener, Stage, Warned
from unshard.read.dcp.items import inflated_bytes
from unshard.read.format import blaming
from unshard.read.hub_files import MODULES, RECORD_NAME
from unshard.read.model_config import OF_TRANSFORMERS, TRANSFORMERS
from unshard.read.open import Checkpoint, open_whole
from unshard.showing import hearing
from unshard.stores.nodes.connection import disconnecting
from unshard.write.verification.comparison import ByConfig, Comparison, Loading, Tolerances

# What shaped the output shapes what it is compared with, but for casts, which are allowed for,
# another file, and what says how to read: this depends on what `against` is.
_OTHERWISE = {"dtype", "keep_fp32", "optimizer", "base", "ep_size"}
_ACCEPTING = MergeKeywords(allow_missing=True, allow_unexpected=True)
_AS_MERGED = [name for name, one in OPTIONS.items() if one.shapes and name not in _OTHERWISE]


@accepting(VerifyKeywords)
@disconnecting()
def verify(
    output: str | Path,
    against: str | Path | None = None,
    *,
    checksums: str | Path | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    dtype: DtypeLike | None = None,
    load: bool = False,
    names: Names | None = None,
    listener: Listener | None = None,
    **options: Unpack[VerifyKeywords],
) -> Comparison:
    """Compare every tensor of a merged model with a checkpoint, another model, or checksums.

    The output's names are also compared with those that its config implies, if it determines them.
    Memory is bounded. If the dtypes differ and `merge` may cast between them, the values of
    `against` are cast first, so a bfloat16 merge of a float32 checkpoint equals it exactly.

    Args:
        output: a directory with whole weights, or one file; shards next to them are ignored.
        against: a checkpoint or a model, converted as by `merge`, without a cast.
        checksums: instead, a file with the SHA-256 of each tensor: lines of `sha256sum`, or JSON:
            `unshard.json`, what `unshard checksums --json` prints, or the answer of vLLM's weight
            checker, if each rank has whole tensors.
        atol: allowed |ours - theirs|; `rtol` adds to it.
        rtol: allowed |ours - theirs| / |theirs|. If both are 0, the comparison is bit by bit.
        dtype: cast both to this first: bfloat16, float16 or float32, given as for `merge`.
        load: also load names and shapes with transformers or diffusers, whichever the config is
            for (extra `torch`). Of an output in an object store, config.json is copied into a
            temporary directory for that.
        names: "hub" or "training", as given to `merge`; default: as in the output's record.
        listener: as for `merge`.
        options: as given to `merge`; the defaults of `include`, `exclude`, `quantize` and
            `lora_alpha` are those in the output's record, and that of `config` is the output's own.
            Options that choose and read a checkpoint (`weights`, `step`, `also` …) apply to
            `against`.

    Raises:
        UnshardError: one of the tree in `unshard.errors`; models that differ are not an error.
    """
    has_more = load or bool(options.get("engine"))
    _check(against, checksums, (atol, rtol), has_more=has_more)
    place = given_path(output, "the output")
    other = given_path("." if against is None else against, "⟦--against⟧")
    with blaming(place):
        chosen = _as_merged(place, names, options)
    with ExitStack() as stack:
        heard = stack.enter_context(hearing(listener))
        heard(Stage("reading"))
        ours = open_whole(place, chosen.reading)
        mine = _cast(as_stored(ours.catalog), dtype)
        if checksums is not None:
            file = given_path(checksums, "⟦--checksums⟧")
            with Sources((ours,)).steady():
                return compare_checksums(mine, file, chosen.resources, heard)
        theirs = read_checkpoint(other, chosen)
        heard(Chosen(f"comparing {ours.location.place} with {theirs.title}"))
        for note in theirs.catalog.notes:
            heard(Warned(note))
        if inflated_bytes(theirs.catalog):
            heard(Stage("decompressing"))
            theirs = inflated(theirs, stack)
        if _has_scales(theirs) and not _has_scales(ours):
            chosen = replace(chosen, dtype="float32")  # exact: dequantised, and then cast to ours
        other_side = _cast(_choose_form(theirs, chosen, {one.name for one in mine}), dtype)
        tolerances = Tolerances(atol, rtol)
        both = Sources((ours, theirs))  # what differs may be of another step
        with both.steady(), engine_for(chosen.engine, chosen.resources, heard) as engine:
            found = compare(mine, other_side, tolerances, engine)
        found = replace(found, by_config=_compare_by_config(ours, chosen))
        if load:
            heard(Stage("loading"))
            loading = _load(ours, mine)
            found = replace(found, loading=loading)
        return found


def _check(
    against: str | Path | None,
    checksums: str | Path | None,
    tolerances: tuple[float, float],
    *,
    has_more: bool,
) -> None:
    if not all(0 <= one < inf for one in tolerances):
        raise UsageError("⟦--atol⟧, ⟦--rtol⟧: a tolerance must be a number, 0 or more")
    if against is checksums is None:
        raise UsageError("verify needs either ⟦--against⟧ or ⟦--checksums⟧")
    if checksums is not None and (against is not None or any(tolerances) or has_more):
        others = "⟦--against⟧, ⟦--atol⟧, ⟦--rtol⟧, ⟦--load⟧ and ⟦--engine⟧"
        raise UsageError(f"⟦--checksums⟧ excludes {others}")


def _load(ours: Checkpoint, tensors: Sequence[Converted]) -> Loading:
    """Load names and shapes of an output by the library of its config.

    Raises:
        UsageError: that cannot be tried: for this library, or because it is not installed.
        OutputError: it does not load them.
    """
    from unshard.write.verification.load import forms_of, verify_load

    config, forms = ours.config, forms_of(tensors)
    library = TRANSFORMERS if config is None else config.library
    if config is not None and library.name == "diffusers":
        from unshard.engines.libraries import place_in_diffusers

        return place_in_diffusers(config, forms)
    modules = ours.companions.files.get(MODULES)
    if modules is not None:
        from unshard.engines.libraries import place_in_modules

        return place_in_modules(modules, forms)
    if library.name not in OF_TRANSFORMERS:
        of = f"a config of {library.name}" if library.name else "no field that names a library"
        what = f"⟦--load⟧: {config and config.path} is not of transformers or diffusers"
        raise UsageError(what, found=of)
    return verify_load(ours.location.weights_dir, forms)


def _has_scales(checkpoint: Checkpoint) -> bool:
    """Return whether a model has matrices in block FP8."""
    return any(map(is_scale, checkpoint.catalog.tensors))


def _as_merged(output: Path, names: Names | None, options: VerifyKeywords) -> MergeOptions:
    """Return the options to convert the other side by: as given, or as recorded in the output."""
    path = (output if output.is_dir() else output.parent) / RECORD_NAME
    record = JsonFields(path, json_object(path) if path.is_file() else {}).inside("options")
    take = {bool: record.flag, int: record.count, float: record.number}
    found = {name: take.get(OPTIONS[name].kind, record.text)(name) for name in _AS_MERGED}
    merged = cast("MergeKeywords", {name: one for name, one in found.items() if one is not None})
    if merged.get("lora") == "both":
        merged["lora"] = "fuse"
    if names is not None or options.get("base") is not None:
        merged["names"] = names or "hub"
    own = output / "config.json"
    merged["config"] = own if own.is_file() else "none"
    if (output / MODULES).is_file():
        merged["config"] = output
    chosen = MergeOptions(**options).chosen  # an empty expression is none, as is no alpha
    given = {name: one for name, one in chosen.items() if one or name not in _AS_MERGED}
    return MergeOptions(**merged | cast("MergeKeywords", given) | _ACCEPTING)


def _compare_by_config(ours: Checkpoint, options: MergeOptions) -> ByConfig | None:
    """Compare the output's names with those that its config implies."""
    names = ours.catalog.tensors
    expected = expected_names(names, ours.config, options)
    if expected is None:
        return None
    known = {*expected.names, *expected.excused}
    there = {*names, *expected.excused}
    return ByConfig(
        tuple(name for name in expected.names if name not in there),
        tuple(name for name in names if name not in known),
    )


def _choose_form(
    checkpoint: Checkpoint, options: MergeOptions, ours: set[str]
) -> Sequence[Converted]:
    """Return what the output is compared with: a model as it is, or a checkpoint as merged.

    A whole model is taken as it is if that fits the output's names better; a head that it stores
    twice, tied, is not missed.
    """
    merged: Sequence[Converted] = convert(Sources((checkpoint,)), options, all_shapes=False).tensors
    if checkpoint.location.format.sharded or checkpoint.adapter is not None:
        return merged
    stored = as_stored(checkpoint.catalog)
    wanted = {one.name for one in merged}
    if len(ours ^ {one.name for one in stored}) > len(ours ^ wanted):
        return merged
    tied = find_stored_ties(checkpoint.catalog.tensors, checkpoint.config)
    return [one for one in stored if one.name in ours or one.name not in tied.equal]


def _cast(tensors: Sequence[Converted], dtype: DtypeLike | None) -> Sequence[Converted]:
    """Return tensors that are cast to a dtype where a merge may cast them; None: as they are."""
    if dtype is None:
        return tensors
    rule = precision(dtype, None, None, None)
    return [one._replace(dtype=rule.dtype(one.name, one.dtype)) for one in tensors]
