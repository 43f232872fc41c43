"""Arithmetic of a comparison: parts of two tensors measured, and the measures united.

Differences and norms are float64; differences of integers are exact before they become float64.
Measures can be added in any order: the sums of squares are exact, as fractions, unless they are
NaN or infinite.

Where norms are not asked for, bits are compared as integers, and arithmetic is done on the elements
that differ alone: of two neighbouring steps those are few.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import inf, isfinite, isnan, nan, sqrt

import numpy as np
from numpy.typing import NDArray

from unshard.containers.strided import Elements
from unshard.write.verification.comparison import Tolerances, Values

_PART = 8192
_SAMPLE = 64 * 1024  # bytes of each tile that are compressed: all of them would take too long
_LEVEL = 3  # of which parts take about as much as the whole, unlike that of level 1
_LOCAL = threading.local()

_Numbers = NDArray[np.float64] | NDArray[np.complex128]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Side:
    """One tensor's part: the sum of its squares, how many are NaN or infinite, if any is not 0."""

    squares: Fraction | float = field(default=Fraction(0))
    nans: int = 0
    nonzero: bool = False
    infs: int = 0

    def __add__(self, other: "_Side") -> "_Side":
        squares = _sum(self.squares, other.squares)
        nans, infs = self.nans + other.nans, self.infs + other.infs
        return _Side(squares, nans, self.nonzero or other.nonzero, infs)


def _sum(*squares: Fraction | float) -> Fraction | float:
    infinite = [one for one in squares if isinstance(one, float)]  # or NaN, and stays so
    return sum(infinite or squares)


def _root(squares: Fraction | float) -> float:
    try:
        return sqrt(squares)
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
    squares: Fraction | float = field(default=Fraction(0))
    delta_bytes: float = 0.0

    def __add__(self, other: "Measures") -> "Measures":
        return Measures(
            self.elements + other.elements,
            self.ours + other.ours,
            self.theirs + other.theirs,
            self.different + other.different,
            self.different_values + other.different_values,
            max(self.max_abs_diff, other.max_abs_diff),
            max(self.max_rel_diff, other.max_rel_diff),
            _sum(self.squares, other.squares),
            self.delta_bytes + other.delta_bytes,
        )

    def values(self) -> Values:
        """Return what all elements together are."""
        return Values(
            elements=self.elements,
            different=self.different,
            different_values=self.different_values,
            max_abs_diff=self.max_abs_diff,
            max_rel_diff=self.max_rel_diff,
            norm_ours=_root(self.ours.squares),
            norm_theirs=_root(self.theirs.squares),
            nans_ours=self.ours.nans,
            nans_theirs=self.theirs.nans,
            all_zero_ours=self.elements > 0 and not self.ours.nonzero,
            all_zero_theirs=self.elements > 0 and not self.theirs.nonzero,
            rms_diff=_root(_sum(self.squares) / max(self.elements, 1)),
            infs_ours=self.ours.infs,
            infs_theirs=self.theirs.infs,
            delta_bytes=None if isnan(self.delta_bytes) else round(self.delta_bytes),
        )


def measure(ours: Elements, theirs: Elements, tolerances: Tolerances) -> Measures:
    """Compare two tiles of equal shape, whose dtypes are what their elements are, in small parts.

    Parts stay in the processor's cache, and are cut by number of elements only.
    """
    one, other = ours.reshape(-1), theirs.reshape(-1)
    if not tolerances.norms and one.dtype == other.dtype:
        return _measure_changes(one, other, tolerances)
    parts = (slice(start, start + _PART) for start in range(0, one.size, _PART))
    with np.errstate(all="ignore"):
        measured = (_measure_part(one[part], other[part], tolerances) for part in parts)
        return sum(measured, start=Measures(delta_bytes=nan))


def _measure_changes(one: Elements, other: Elements, tolerances: Tolerances) -> Measures:
    """Compare as `measure` does, but for norms; sizes of samples of the XOR are added."""
    (nans, infs), (mine, theirs) = _count_not_finite(one), _changed(one, other)
    same = _Side(nan, nans, nonzero=True, infs=infs)
    if not len(mine):
        return Measures(one.size, same, same)
    apart = measure(mine, theirs, replace(tolerances, norms=True))
    nans += apart.theirs.nans - apart.ours.nans
    infs += apart.theirs.infs - apart.ours.infs
    new, delta = replace(same, nans=nans, infs=infs), _estimate_delta(one, other)
    return replace(apart, elements=one.size, ours=same, theirs=new, delta_bytes=delta)


def _changed(one: Elements, other: Elements) -> tuple[Elements, Elements]:
    """Return the elements with other bits; if most are such, all: an index takes longer."""
    if one.itemsize <= 8 and not one.nbytes % 8:  # words of 8 bytes are compared first, for speed
        words = np.flatnonzero(one.view("u8") != other.view("u8"))
        if 4 * len(words) * 8 < one.nbytes:
            one, other = (side.view("u8")[words].view(side.dtype) for side in (one, other))
    places = np.flatnonzero(_different_bits(one, other))  # faster than a mask
    return (one, other) if 2 * len(places) > one.size else (one[places], other[places])


def _count_not_finite(values: Elements) -> tuple[int, int]:
    """Return how many values are NaN, and how many are infinite."""
    if values.dtype.kind in "biu" or not values.size:
        return 0, 0
    if values.dtype.kind == "c" or values.itemsize == 1:
        numbers = _numbers(values)
        return int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum())
    # As integers, the largest numbers of either sign are NaN, and below them is infinity.
    words = values.view(f"u{values.itemsize}")
    sign = words.dtype.type(1 << (8 * values.itemsize - 1))
    infinite = np.asarray(inf, values.dtype).view(words.dtype)[()]
    if words.max() < infinite | sign and words.view(f"i{values.itemsize}").max() < infinite:
        return 0, 0
    sizes = words & ~sign
    return int((sizes > infinite).sum()), int((sizes == infinite).sum())


def _estimate_delta(one: Elements, other: Elements) -> float:
    """Return about what the XOR of two tiles takes, compressed: all of it as its first bytes."""
    if not hasattr(_LOCAL, "compress"):  # for one thread
        with suppress(ImportError):
            from zstandard import ZstdCompressor

            _LOCAL.compress = ZstdCompressor(_LEVEL).compress
    xor = one.view(np.uint8)[:_SAMPLE] ^ other.view(np.uint8)[:_SAMPLE]
    compress = getattr(_LOCAL, "compress", None)
    return nan if compress is None else len(compress(xor.data)) * one.nbytes / len(xor)


def _measure_part(ours: Elements, theirs: Elements, tolerances: Tolerances) -> Measures:
    bits = _different_bits(ours, theirs) if ours.dtype == theirs.dtype else None
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
    squares = float(np.nansum(np.square(diff)))
    shares = np.divide(diff, size, out=np.zeros_like(diff), where=diff > 0)
    return Measures(
        one.size,
        _side(one),
        _side(other),
        int(np.count_nonzero(apart)),
        int(np.count_nonzero(~same)),
        largest,
        inf if largest == inf else float(shares.max(initial=0)),  # inf / inf would be NaN
        Fraction(squares) if isfinite(squares) else squares,
    )


def _different_bits(ours: Elements, theirs: Elements) -> _Flags:
    """Return, for each element of one dtype, whether the bits differ."""
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
    exact: Fraction | float = squares
    nans = infs = 0
    if isfinite(squares):
        exact = Fraction(squares)
    else:
        nans, infs = int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum())
    return _Side(exact, nans, squares != 0 or bool(np.any(numbers)), infs)
