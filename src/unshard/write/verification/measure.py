"""Arithmetic of a comparison: parts of two tensors measured, and the measures united.

Differences and norms are float64; differences of integers are exact before they become float64.
Uniting depends on no order: sums of parts are added as fractions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from unshard.containers.strided import Elements
from unshard.write.verification.comparison import Tolerances, Values

__all__ = ["Measures", "Tally", "measure"]

_PART = 8192

_Numbers = NDArray[np.float64] | NDArray[np.complex128]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Side:
    """One tensor's part: the sum of its squares, how many are NaN, whether any is not 0."""

    squares: float
    nans: int
    nonzero: bool


@dataclass(frozen=True, slots=True)
class Measures:
    """What as many elements of either tensor are; the attributes are as in `Values`."""

    elements: int
    ours: _Side
    theirs: _Side
    different: int = 0
    different_values: int = 0
    max_abs_diff: float = 0.0
    max_rel_diff: float = 0.0


def measure(ours: Elements, theirs: Elements, tolerances: Tolerances) -> Iterator[Measures]:
    """Compare two tiles of equal shape, whose dtypes are what their elements are, in small parts.

    Parts stay in the processor's cache, and are cut by number of elements only.
    """
    one, other = ours.reshape(-1), theirs.reshape(-1)
    for start in range(0, one.size, _PART):
        part = slice(start, start + _PART)
        with np.errstate(all="ignore"):
            yield _measure_part(one[part], other[part], tolerances)


def _measure_part(ours: Elements, theirs: Elements, tolerances: Tolerances) -> Measures:
    bits = _different_bits(ours, theirs)
    one = _numbers(ours)
    if bits is not None and not bits.any():
        side = _side(one)
        return Measures(one.size, side, side)
    other = _numbers(theirs)
    diff = _distance(ours, theirs, one, other)
    same = diff == 0
    if not isfinite(diff.max()):
        same |= np.isnan(one) & np.isnan(other)
    if not tolerances.exact:
        limit = tolerances.atol + tolerances.rtol * np.abs(other)
        apart = ~(same | ((diff <= limit) & (diff < inf)))
    else:
        apart = ~same if bits is None else bits
    return Measures(
        one.size,
        _side(one),
        _side(other),
        int(np.count_nonzero(apart)),
        int(np.count_nonzero(~same)),
        float(np.fmax.reduce(diff, initial=0)),
        _largest_relative(diff, np.abs(other)),
    )


def _largest_relative(diff: NDArray[np.float64], size: NDArray[np.float64]) -> float:
    """Return the largest diff / size: infinite for an infinite diff or no size, NaN left out."""
    if np.fmax.reduce(diff, initial=0) == inf:
        return inf
    shares = np.divide(diff, size, out=np.zeros_like(diff), where=diff > 0)
    return float(shares.max(initial=0))


def _different_bits(ours: Elements, theirs: Elements) -> _Flags | None:
    """Return, for each element, whether the bits differ; None if the dtypes do."""
    if ours.dtype != theirs.dtype:
        return None
    word = f"u{min(ours.itemsize, 8)}"
    words = ours.itemsize // int(word[1:])
    apart: _Flags = np.not_equal(ours.view(word), theirs.view(word)).reshape(-1, words)
    return apart[:, 0] if words == 1 else np.logical_or(apart[:, 0], apart[:, 1])


def _numbers(elements: Elements) -> _Numbers:
    """Return elements of any dtype as numbers of 64 bits."""
    if elements.dtype.kind == "c":
        return elements.astype(np.complex128)
    return elements.astype(np.float64)


def _distance(
    ours: Elements, theirs: Elements, one: _Numbers, other: _Numbers
) -> NDArray[np.float64]:
    """Return |ours - theirs|: 0 for equal infinities, NaN where a side is NaN."""
    if ours.dtype == theirs.dtype and ours.dtype.kind in "iu":
        lower, upper = np.minimum(ours, theirs), np.maximum(ours, theirs)
        word = f"u{ours.itemsize}"  # the difference fits without a sign, and wraps to be right
        exact: NDArray[np.float64] = (upper.view(word) - lower.view(word)).astype(np.float64)
        return exact
    diff: NDArray[np.float64] = np.abs(one - other)
    if not isfinite(diff.max()):
        diff[one == other] = 0
    return diff


def _side(numbers: _Numbers) -> _Side:
    sizes = np.abs(numbers) if np.iscomplexobj(numbers) else numbers
    squares = float(np.square(sizes).sum())
    nans = 0 if isfinite(squares) else int(np.count_nonzero(np.isnan(numbers)))
    return _Side(squares, nans, squares != 0 or bool(np.any(numbers)))


class _Sum:
    """A sum of floats that depends on no order: exact, and NaN or infinite as soon as one is."""

    def __init__(self) -> None:
        self._finite = Fraction(0)
        self._rest = 0.0

    def add(self, value: float) -> None:
        if isfinite(value):
            self._finite += Fraction(value)
        else:
            self._rest += value

    def root(self) -> float:
        if self._rest != 0:
            return self._rest
        try:
            return sqrt(self._finite)
        except OverflowError:
            return inf


class Tally:
    """Unites the parts of one tensor, in any order."""

    def __init__(self) -> None:
        self._elements = self._different = self._different_values = 0
        self._max_abs = self._max_rel = 0.0
        self._squares = (_Sum(), _Sum())
        self._nans = [0, 0]
        self._nonzero = [False, False]

    def add(self, part: Measures) -> None:
        """Take a part's measures in."""
        self._elements += part.elements
        self._different += part.different
        self._different_values += part.different_values
        self._max_abs = max(self._max_abs, part.max_abs_diff)
        self._max_rel = max(self._max_rel, part.max_rel_diff)
        for index, side in enumerate((part.ours, part.theirs)):
            self._squares[index].add(side.squares)
            self._nans[index] += side.nans
            self._nonzero[index] |= side.nonzero

    def values(self) -> Values:
        """Return what all parts together are."""
        some = self._elements > 0
        return Values(
            elements=self._elements,
            different=self._different,
            different_values=self._different_values,
            max_abs_diff=self._max_abs,
            max_rel_diff=self._max_rel,
            norm_ours=self._squares[0].root(),
            norm_theirs=self._squares[1].root(),
            nans_ours=self._nans[0],
            nans_theirs=self._nans[1],
            all_zero_ours=some and not self._nonzero[0],
            all_zero_theirs=some and not self._nonzero[1],
        )
