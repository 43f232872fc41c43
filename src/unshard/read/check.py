"""Check that a catalog's chunks make whole tensors: no hole, no overlap; all problems at once."""

from unshard.errors import CorruptError, IncompleteError, UnshardError, raise_all
from unshard.tensors.boxes import distinct, find_gap
from unshard.tensors.catalog import Catalog, TensorEntry

__all__ = ["check"]


def check(catalog: Catalog) -> None:
    """Raise if any tensor is not covered exactly by its chunks, replicas aside.

    Raises:
        IncompleteError: there are holes, and rank files are missing.
        CorruptError: there are holes or overlaps although every file is there.
    """
    problems = [
        problem
        for entry in catalog.tensors.values()
        if (problem := _problem(entry, incomplete=bool(catalog.missing)))
    ]
    if not problems:
        return
    if not catalog.missing:
        raise_all(CorruptError, "the chunks do not make whole tensors", problems)
    names = "\n".join(f"  missing: {path}" for path in catalog.missing[:16])
    more = len(catalog.missing) - 16
    raise IncompleteError(
        f"{catalog.roots[0]}: {_ranks_missing(catalog)}\n{names}"
        + (f" and {more} more" if more > 0 else ""),
        expected=f"the files of all {catalog.world_size} ranks (replicas of others may be missing)",
        found=f"{len(problems)} tensors with holes, the first: {problems[0].subject}",
        hint="copy the files here from the nodes that wrote them, or take another checkpoint",
    )


def _ranks_missing(catalog: Catalog) -> str:
    ranks = ", ".join(str(rank) for rank in catalog.missing_ranks[:16])
    return f"Missing checkpoint for rank {ranks} of world size {catalog.world_size}"


def _problem(entry: TensorEntry, *, incomplete: bool) -> UnshardError | None:
    rows = distinct(entry.chunks.offsets, entry.chunks.sizes)
    gap = find_gap(entry.chunks.offsets[rows], entry.chunks.sizes[rows], entry.shape)
    if gap is None:
        return None
    kind, box = gap
    what = "no rank holds" if kind == "hole" else "more than one rank holds, as different chunks,"
    error = IncompleteError if incomplete and kind == "hole" else CorruptError
    return error(f"tensor {entry.fqn} {list(entry.shape)}: {what} its region {box}")
