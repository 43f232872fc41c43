"""`verify`: compare a merged model with its checkpoint, another model, or checksums."""

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
from unshard.console import listener_or_default
from unshard.containers.json_file import JsonFields, json_object
from unshard.convert.outputs import ConvertedTensor, precision
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
from unshard.stores.nodes.connection import disconnecting
from unshard.write.verification.comparison import ByConfig, Comparison, Loading, Tolerances

# The recorded options of the output also apply to the other side, except casts, which are allowed
# for, the optimizer, which is another file, and options that depend on the form of `against`.
_OTHERWISE = {"dtype", "keep_fp32", "optimizer", "base", "ep_size"}
_ACCEPTING = MergeKeywords(allow_missing=True, allow_unexpected=True)
_AS_MERGED = [name for name, option in OPTIONS.items() if option.shapes and name not in _OTHERWISE]


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

    The output's names are also compared with those that its config determines. Memory is bounded.
    If the dtypes differ and `merge` may cast between them, the values of `against` are cast first,
    so a bfloat16 merge of a float32 checkpoint equals it exactly.

    Args:
        output: a directory with whole weights, or one file; shards next to them are ignored.
        against: a checkpoint or a model, converted as by `merge`, without a cast.
        checksums: instead, a file with the SHA-256 of each tensor: lines of `sha256sum`, or JSON:
            `unshard.json`, the output of `unshard checksums --json`, or the answer of vLLM's weight
            checker, if each rank has whole tensors.
        atol: allowed |ours - theirs|; `rtol` adds to it.
        rtol: allowed |ours - theirs| / |theirs|. If both are 0, the comparison is bit by bit.
        dtype: cast both to this first: bfloat16, float16 or float32, given as for `merge`.
        load: also load names and shapes with transformers or diffusers, depending on the config
            (extra `torch`). For an output in an object store, config.json is copied into a
            temporary directory.
        names: "hub" or "training", as given to `merge`; default: as in the output's record.
        listener: as for `merge`.
        options: as given to `merge`; the defaults of `include`, `exclude`, `quantize` and
            `lora_alpha` are those in the output's record, and that of `config` is the output's own.
            Options that choose and read a checkpoint (`weights`, `step`, `also` …) apply to
            `against`.

    Raises:
        UnshardError: see `unshard.errors`; models that differ are not an error.
    """
    has_more = load or bool(options.get("engine"))
    _check(against, checksums, (atol, rtol), has_more=has_more)
    path = given_path(output, "the output")
    other = given_path("." if against is None else against, "⟦--against⟧")
    with blaming(path):
        chosen = _as_merged(path, names, options)
    with ExitStack() as stack:
        heard = stack.enter_context(listener_or_default(listener))
        heard(Stage("reading"))
        ours = open_whole(path, chosen.reading)
        our_tensors = _cast(as_stored(ours.catalog), dtype)
        if checksums is not None:
            file = given_path(checksums, "⟦--checksums⟧")
            with Sources((ours,)).steady():
                return compare_checksums(our_tensors, file, chosen.resources, heard)
        theirs = read_checkpoint(other, chosen)
        heard(Chosen(f"comparing {ours.location.place} with {theirs.title}"))
        for note in theirs.catalog.notes:
            heard(Warned(note))
        if inflated_bytes(theirs.catalog):
            heard(Stage("decompressing"))
            theirs = inflated(theirs, stack)
        if _has_scales(theirs) and not _has_scales(ours):
            chosen = replace(chosen, dtype="float32")  # exact: dequantised, and then cast to ours
        names_of_ours = {tensor.name for tensor in our_tensors}
        their_tensors = _cast(_choose_form(theirs, chosen, names_of_ours), dtype)
        both = Sources((ours, theirs))  # a difference may be due to a file that changes meanwhile
        with both.steady(), engine_for(chosen.engine, chosen.resources, heard) as engine:
            comparison = compare(our_tensors, their_tensors, Tolerances(atol, rtol), engine)
        comparison = replace(comparison, by_config=_compare_by_config(ours, chosen))
        if load:
            heard(Stage("loading"))
            comparison = replace(comparison, loading=_load(ours, our_tensors))
        return comparison


def _check(
    against: str | Path | None,
    checksums: str | Path | None,
    tolerances: tuple[float, float],
    *,
    has_more: bool,
) -> None:
    if not all(0 <= tolerance < inf for tolerance in tolerances):
        raise UsageError("⟦--atol⟧, ⟦--rtol⟧: a tolerance must be a number, 0 or more")
    if against is checksums is None:
        raise UsageError("verify needs either ⟦--against⟧ or ⟦--checksums⟧")
    if checksums is not None and (against is not None or any(tolerances) or has_more):
        others = "⟦--against⟧, ⟦--atol⟧, ⟦--rtol⟧, ⟦--load⟧ and ⟦--engine⟧"
        raise UsageError(f"⟦--checksums⟧ excludes {others}")


def _load(ours: Checkpoint, tensors: Sequence[ConvertedTensor]) -> Loading:
    """Load names and shapes of an output by the library of its config.

    Raises:
        UsageError: the library is not supported, or not installed.
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
    """Return the options for converting the other side: as given, or as recorded in the output."""
    path = (output if output.is_dir() else output.parent) / RECORD_NAME
    record = JsonFields(path, json_object(path) if path.is_file() else {}).inside("options")
    take = {bool: record.flag, int: record.count, float: record.number}
    recorded = {name: take.get(OPTIONS[name].kind, record.text)(name) for name in _AS_MERGED}
    recorded = {name: value for name, value in recorded.items() if value is not None}
    merged = cast("MergeKeywords", recorded)
    if merged.get("lora") == "both":
        merged["lora"] = "fuse"
    if names is not None or options.get("base") is not None:
        merged["names"] = names or "hub"
    own = output / "config.json"
    merged["config"] = own if own.is_file() else "none"
    if (output / MODULES).is_file():
        merged["config"] = output
    chosen = MergeOptions(**options).chosen
    # An empty regular expression, or an alpha of 0, overrides nothing.
    given = {name: value for name, value in chosen.items() if value or name not in _AS_MERGED}
    return MergeOptions(**merged | cast("MergeKeywords", given) | _ACCEPTING)


def _compare_by_config(ours: Checkpoint, options: MergeOptions) -> ByConfig | None:
    """Compare the output's names with those that its config implies."""
    names = ours.catalog.tensors
    expected = expected_names(names, ours.config, options)
    if expected is None:
        return None
    present, allowed = {*names, *expected.excused}, {*expected.names, *expected.excused}
    return ByConfig(
        tuple(name for name in expected.names if name not in present),
        tuple(name for name in names if name not in allowed),
    )


def _choose_form(
    checkpoint: Checkpoint, options: MergeOptions, ours: set[str]
) -> Sequence[ConvertedTensor]:
    """Return the tensors of a checkpoint as merged, or of a whole model as stored.

    A whole model is compared as it is stored if that fits the output's names better; a tied head
    that the output does not have is left out.
    """
    merged: Sequence[ConvertedTensor] = convert(
        Sources((checkpoint,)), options, all_shapes=False
    ).tensors
    if checkpoint.location.format.sharded or checkpoint.adapter is not None:
        return merged
    stored = as_stored(checkpoint.catalog)
    unmatched = [len(ours ^ {one.name for one in tensors}) for tensors in (stored, merged)]
    if unmatched[0] > unmatched[1]:
        return merged
    tied = find_stored_ties(checkpoint.catalog.tensors, checkpoint.config)
    return [one for one in stored if one.name in ours or one.name not in tied.equal]


def _cast(tensors: Sequence[ConvertedTensor], dtype: DtypeLike | None) -> Sequence[ConvertedTensor]:
    """Return tensors, cast to `dtype` where a merge may cast them."""
    if dtype is None:
        return tensors
    rule = precision(dtype, None, None, None)
    return [one._replace(dtype=rule.dtype(one.name, one.dtype)) for one in tensors]
