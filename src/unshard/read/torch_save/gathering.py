"""Uniting what the files of several ranks hold into drafts of tensors."""

from array import array

from unshard.errors import CorruptError, UnshardError
from unshard.read.drafts import TensorDraft
from unshard.read.torch_save.table import RankTable, TensorForm
from unshard.tensors.catalog import Skipped
from unshard.tensors.placements import Sharding

__all__ = ["Gathering"]


class Gathering:
    """Unites the tables of rank files, taken in rank order.

    Attributes:
        drafts: the tensors, as the first rank that has each describes it. Of a plain tensor, each
            chunk is one rank's whole tensor; `copies` decides what they are together.
        ranks: the ranks that have each tensor, including those that store no element of it.
        skipped: values that are not tensors.
        problems: tensors that cannot be read, or on which ranks disagree.
    """

    def __init__(self) -> None:
        self.drafts: dict[str, TensorDraft] = {}
        self.ranks: dict[str, array[int]] = {}
        self.skipped: dict[str, Skipped] = {}
        self.problems: list[UnshardError] = []
        self._forms: dict[str, TensorForm] = {}

    @property
    def plain(self) -> list[TensorDraft]:
        """The tensors of which nothing says how they are cut."""
        return [self.drafts[name] for name, form in self._forms.items() if form.is_plain]

    def add(self, table: RankTable) -> None:
        """Add what one file holds; contradictions to earlier files go to `problems`."""
        self.problems.extend(table.problems)
        for name, reason in table.skipped.items():
            self.skipped.setdefault(name, Skipped(name, reason))
        at = chunk = 0
        for name, number, count in zip(table.names, table.forms, table.counts, strict=True):
            form = table.form_table[number]
            if name not in self.drafts:
                self._forms[name], self.ranks[name] = form, array("i")
                self.drafts[name] = TensorDraft(name, form.dtype, form.shape, form.sharding)
            first, ranks = self._forms[name], self.ranks[name]
            end = at + count * (4 + 2 * len(form.shape))
            if _agree(first, form):
                ranks.append(table.rank)
                odd = _numbered(table.odd_strides, chunk, count) if table.odd_strides else {}
                self.drafts[name].rows.extend(table.rows[at:end], odd)
            else:
                what = f"rank {table.rank}: {form}, but rank {ranks[0]} says {first}"
                self.problems.append(CorruptError(f"tensor {name}: {what}"))
            at, chunk = end, chunk + count


def _numbered(
    odd_strides: dict[int, tuple[int, ...]], first: int, count: int
) -> dict[int, tuple[int, ...]]:
    return {n: odd_strides[first + n] for n in range(count) if first + n in odd_strides}


def _agree(first: TensorForm, other: TensorForm) -> bool:
    """Return whether ranks agree. Plain tensors may differ in size: they may be shards."""
    if first.dtype is not other.dtype or first.is_plain is not other.is_plain:
        return False
    if first.is_plain:
        return len(first.shape) == len(other.shape)
    return first.shape == other.shape and _are_cut_alike(first.sharding, other.sharding)


def _are_cut_alike(first: Sharding | None, other: Sharding | None) -> bool:
    """Return whether two ranks describe the same mesh; their coordinates on it differ."""
    if first is None or other is None:
        return first is other
    same_mesh = first.mesh.shape == other.mesh.shape
    return same_mesh and first.placements == other.placements
