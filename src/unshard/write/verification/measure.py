"""Arithmetic of a comparison: statistics of parts of two tensors, and their sums.

Differences and norms are float64; differences of integers are exact before they become float64.
Sums do not depend on the order of parts: squares are added as exact fractions, unless they are NaN
or infinite.

Without norms, bits are compared as integers, and arithmetic is done only on the elements that
differ, which are few between neighbouring steps.
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
_SAMPLE = 64 * 1024  # bytes of each tile to compress; compressing all would take too long
_LEVEL = 3  # compresses a part about as well as the whole; level 1 does not
_LOCAL = threading.local()

_Numbers = NDArray[np.float64] | NDArray[np.complex128]
_Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Side:
    """Statistics of one tensor: sum of squares, number of NaN and infinities, any nonzero."""

    squares: Fraction | float = field(default=Fraction(0))
    nans: int = 0
    nonzero: bool = False
    infs: int = 0

    def __add__(self, other: "_Side") -> "_Side":
        squares = _sum(self.squares, other.squares)
        nans, infs = self.nans + other.nans, self.infs + other.infs
        return _Side(squares, nans, self.nonzero or other.nonzero, infs)


def _sum(*squares: Fraction | float) -> Fraction | float:
    floats = [square for square in squares if isinstance(square, float)]  # infinite or NaN
    return sum(floats or squares)


def _root(squares: Fraction | float) -> float:
    try:
        return sqrt(squares)
    except OverflowError:
        return inf


@dataclass(frozen=True, slots=True)
class Measures:
    """Statistics of equally many elements of both tensors; see `Values` for the attributes."""

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
        """Return the statistics of all elements."""
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
    """Compare two tiles of equal shape in parts of equally many elements.

    The parts fit into the processor's cache. The tiles have their real dtypes, not raw bytes.
    """
    one, other = ours.reshape(-1), theirs.reshape(-1)
    if not tolerances.norms and one.dtype == other.dtype:
        return _measure_changes(one, other, tolerances)
    parts = (slice(start, start + _PART) for start in range(0, one.size, _PART))
    with np.errstate(all="ignore"):
        measured = (_measure_part(one[part], other[part], tolerances) for part in parts)
        return sum(measured, start=Measures(delta_bytes=nan))


def _measure_changes(one: Elements, other: Elements, tolerances: Tolerances) -> Measures:
    """Compare as `measure` does, without norms, and estimate the size of the delta."""
    (nans, infs), (mine, theirs) = _count_not_finite(one), _changed(one, other)
    same = _Side(nan, nans, nonzero=True, infs=infs)
    if not len(mine):
        return Measures(one.size, same, same)
    changes = measure(mine, theirs, replace(tolerances, norms=True))
    nans += changes.theirs.nans - changes.ours.nans
    infs += changes.theirs.infs - changes.ours.infs
    new, delta = replace(same, nans=nans, infs=infs), _estimate_delta(one, other)
    return replace(changes, elements=one.size, ours=same, theirs=new, delta_bytes=delta)


def _changed(one: Elements, other: Elements) -> tuple[Elements, Elements]:
    """Return the elements whose bits differ, or all elements if most do: indexing takes longer."""
    if one.itemsize <= 8 and not one.nbytes % 8:  # compare words of 8 bytes first, for speed
        words = np.flatnonzero(one.view("u8") != other.view("u8"))
        if 4 * len(words) * 8 < one.nbytes:
            one, other = (side.view("u8")[words].view(side.dtype) for side in (one, other))
    indices = np.flatnonzero(_different_bits(one, other))  # faster than a mask
    return (one, other) if 2 * len(indices) > one.size else (one[indices], other[indices])


def _count_not_finite(values: Elements) -> tuple[int, int]:
    """Return the numbers of NaN and of infinities."""
    if values.dtype.kind in "biu" or not values.size:
        return 0, 0
    if values.dtype.kind == "c" or values.itemsize == 1:
        numbers = _numbers(values)
        return int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum())
    # As integers, NaNs are the largest numbers of each sign, and infinity is next below them.
    words = values.view(f"u{values.itemsize}")
    sign = words.dtype.type(1 << (8 * values.itemsize - 1))
    infinite = np.asarray(inf, values.dtype).view(words.dtype)[()]
    if words.max() < infinite | sign and words.view(f"i{values.itemsize}").max() < infinite:
        return 0, 0
    sizes = words & ~sign
    return int((sizes > infinite).sum()), int((sizes == infinite).sum())


def _estimate_delta(one: Elements, other: Elements) -> float:
    """Estimate the size of the compressed XOR of two tiles from its first bytes."""
    if not hasattr(_LOCAL, "compress"):  # a compressor is for one thread
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
        different = ~(same | ((diff <= limit) & (diff < inf)))
    else:
        different = ~same if bits is None else bits
    largest = float(np.fmax.reduce(diff, initial=0))  # ignores NaN
    squares = float(np.nansum(np.square(diff)))
    shares = np.divide(diff, size, out=np.zeros_like(diff), where=diff > 0)
    return Measures(
        one.size,
        _side(one),
        _side(other),
        int(np.count_nonzero(different)),
        int(np.count_nonzero(~same)),
        largest,
        inf if largest == inf else float(shares.max(initial=0)),  # inf / inf would be NaN
        Fraction(squares) if isfinite(squares) else squares,
    )


def _different_bits(ours: Elements, theirs: Elements) -> _Flags:
    """Return, for each pair of elements of one dtype, whether the bits differ."""
    word = f"u{min(ours.itemsize, 8)}"
    words = ours.itemsize // int(word[1:])
    flags: _Flags = np.not_equal(ours.view(word), theirs.view(word)).reshape(-1, words)
    return flags[:, 0] if words == 1 else np.logical_or(flags[:, 0], flags[:, 1])


def _numbers(elements: Elements) -> _Numbers:
    """Return elements as float64 or complex128."""
    if elements.dtype.kind == "c":
        return elements.astype(np.complex128)
    return elements.astype(np.float64)


def _distance(
    ours: Elements, theirs: Elements, one: _Numbers, other: _Numbers
) -> NDArray[np.float64]:
    """Return |ours - theirs|: 0 for equal infinities, NaN if a side is NaN."""
    if ours.dtype == theirs.dtype and ours.dtype.kind in "iu":
        lower, upper = np.minimum(ours, theirs), np.maximum(ours, theirs)
        word = f"u{ours.itemsize}"  # the difference fits into it, and wraparound makes it right
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
