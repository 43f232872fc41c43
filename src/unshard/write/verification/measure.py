"""Arithmetic of a comparison: parts of two tensors measured, and the measures united.

Differences and norms are float64; differences of integers are exact before they become float64.
Measures can be added in any order: the sums of squares are exact, as fractions, unless they are
NaN or infinite.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from math import inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from unshard.containers.strided import Elements
from unshard.write.verification.comparison import Tolerances, Values

_PART = 8192

_Numbers = NDArray[np.float64] | NDArray[np.complex128]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Side:
    """One tensor's part: the sum of its squares, how many are NaN, whether any is not 0."""

    squares: Fraction | float = field(default=Fraction(0))
    nans: int = 0
    nonzero: bool = False

    def __add__(self, other: "_Side") -> "_Side":
        both = self.squares, other.squares
        infinite = [one for one in both if isinstance(one, float)]  # or NaN, and stays so
        squares = sum(infinite) if infinite else sum(both)
        return _Side(squares, self.nans + other.nans, self.nonzero or other.nonzero)

    def norm(self) -> float:
        try:
            return sqrt(self.squares)
        except OverflowError:
            return inf


@dataclass(frozen=True, slots=True)
class Measures:
    """What as many elements of either tensor are; the attributes are as in `Values`."""

    elements: int = 0
    ours: _Side = field(default=_Side())
    theirs: _Side = field(default=_Side())
    different: int = 0
    different_values: int = 0
    max_abs_diff: float = 0.0
    max_rel_diff: float = 0.0

    def __add__(self, other: "Measures") -> "Measures":
        return Measures(
            self.elements + other.elements,
            self.ours + other.ours,
            self.theirs + other.theirs,
            self.different + other.different,
            self.different_values + other.different_values,
            max(self.max_abs_diff, other.max_abs_diff),
            max(self.max_rel_diff, other.max_rel_diff),
        )

    def values(self) -> Values:
        """Return what all elements together are."""
        return Values(
            elements=self.elements,
            different=self.different,
            different_values=self.different_values,
            max_abs_diff=self.max_abs_diff,
            max_rel_diff=self.max_rel_diff,
            norm_ours=self.ours.norm(),
            norm_theirs=self.theirs.norm(),
            nans_ours=self.ours.nans,
            nans_theirs=self.theirs.nans,
            all_zero_ours=self.elements > 0 and not self.ours.nonzero,
            all_zero_theirs=self.elements > 0 and not self.theirs.nonzero,
        )


def measure(ours: Elements, theirs: Elements, tolerances: Tolerances) -> Measures:
    """Compare two tiles of equal shape, whose dtypes are what their elements are, in small parts.

    Parts stay in the processor's cache, and are cut by number of elements only.
    """
    one, other = ours.reshape(-1), theirs.reshape(-1)
    parts = (slice(start, start + _PART) for start in range(0, one.size, _PART))
    with np.errstate(all="ignore"):
        measured = (_measure_part(one[part], other[part], tolerances) for part in parts)
        return sum(measured, start=Measures())


def _measure_part(ours: Elements, theirs: Elements, tolerances: Tolerances) -> Measures:
    bits = _different_bits(ours, theirs)
    one = _numbers(ours)
    if bits is not None and not bits.any():
        side = _side(one)
        return Measures(one.size, side, side)
    other = _numbers(theirs)
    size, diff = np.abs(other), _distance(ours, theirs, one, other)
    same = diff == 0
    if not isfinite(diff.max()):
        same |= np.isnan(one) & np.isnan(other)
    if not tolerances.exact:
        limit = tolerances.atol + tolerances.rtol * size
        apart = ~(same | ((diff <= limit) & (diff < inf)))
    else:
        apart = ~same if bits is None else bits
    largest = float(np.fmax.reduce(diff, initial=0))  # NaN left out
    shares = np.divide(diff, size, out=np.zeros_like(diff), where=diff > 0)
    return Measures(
        one.size,
        _side(one),
        _side(other),
        int(np.count_nonzero(apart)),
        int(np.count_nonzero(~same)),
        largest,
        inf if largest == inf else float(shares.max(initial=0)),  # inf / inf would be NaN
    )


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
    exact = Fraction(squares) if isfinite(squares) else squares
    return _Side(exact, nans, squares != 0 or bool(np.any(numbers)))
