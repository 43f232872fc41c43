"""The result of comparing two models, for the terminal, JSON and Python callers."""

from dataclasses import dataclass

from unshard.console import counted


@dataclass(frozen=True, slots=True)
class Tolerances:
    """The largest permitted difference: |ours - theirs| <= atol + rtol * |theirs|.

    If both are 0, every bit must be equal, including NaN payloads and the sign of zero. Otherwise
    NaN equals NaN, and an infinity equals only itself.

    Attributes:
        atol, rtol: as above.
        norms: whether equal values are measured too, for norms and zeros; this takes longest.
    """

    atol: float = 0.0
    rtol: float = 0.0
    norms: bool = True

    @property
    def exact(self) -> bool:
        """Whether bits are compared."""
        return self.atol == 0 and self.rtol == 0


@dataclass(frozen=True, slots=True)
class Values:
    """Statistics of the elements of two tensors of equal shape; computed in float64.

    Attributes:
        elements: number of elements of each tensor.
        different: number of pairs that differ in their bits, or by more than the tolerances.
        different_values: number of pairs of different numbers, with NaN = NaN and -0 = 0.
        max_abs_diff: largest |ours - theirs| where neither is NaN.
        max_rel_diff: largest |ours - theirs| / |theirs| there; infinite where theirs is 0.
        rms_diff: root of the mean square of ours - theirs, 0 where either is NaN.
        norm_ours, norm_theirs: Euclidean norms; NaN or infinite if any element is. NaN in `diff`.
        nans_ours, nans_theirs: number of NaN.
        infs_ours, infs_theirs: number of infinities.
        all_zero_ours, all_zero_theirs: whether every element is 0; False for an empty tensor, and
            in `diff`.
        delta_bytes: estimated size of the XOR of both, compressed by zstd, from even samples; only
            in `diff`, and None without a zstd library.
    """

    elements: int
    different: int
    different_values: int
    max_abs_diff: float
    max_rel_diff: float
    norm_ours: float
    norm_theirs: float
    nans_ours: int
    nans_theirs: int
    all_zero_ours: bool
    all_zero_theirs: bool
    rms_diff: float = 0.0
    infs_ours: int = 0
    infs_theirs: int = 0
    delta_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """Two tensors of the same name.

    Attributes:
        name: the name.
        dtype_ours, dtype_theirs: as stored, or as a merge of the checkpoint would write them.
        shape_ours, shape_theirs: elements per dimension.
        cast: theirs was cast to ours, because a merge may cast between these dtypes.
        equal: same shape, dtype the same or cast, and no element is different.
        values: statistics of the elements; None if the shapes differ.
    """

    name: str
    dtype_ours: str
    dtype_theirs: str
    shape_ours: tuple[int, ...]
    shape_theirs: tuple[int, ...]
    cast: bool
    equal: bool
    values: Values | None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor whose shape differs from the shape that the model class expects."""

    name: str
    found: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loading:
    """The report of transformers on loading the names and shapes of an output.

    Attributes:
        model_class: the model class of the config.
        missing: parameters that are not in the files.
        unexpected: tensors of the files that the class does not have.
        mismatched: tensors with the wrong shape.
    """

    model_class: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]

    @property
    def complete(self) -> bool:
        """Whether every parameter gets a tensor of its shape, and every tensor a parameter."""
        return not (self.missing or self.unexpected or self.mismatched)


@dataclass(frozen=True, slots=True)
class ByConfig:
    """Differences between our names and the names that config.json implies.

    Attributes:
        missing: names that we do not have.
        unexpected: names that the model does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether the names are the same."""
        return not (self.missing or self.unexpected)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Two models, compared.

    Attributes:
        atol, rtol: the tolerances; both 0 if bits were compared.
        tensors: every common name, in our order.
        missing: names that only they have; unexpected: names that only we have.
        by_config: our names compared with our config's; None if it does not determine them.
        loading: the result of loading with transformers, if requested.
    """

    atol: float
    rtol: float
    tensors: tuple[TensorComparison, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    by_config: ByConfig | None = None
    loading: Loading | None = None

    def __repr__(self) -> str:
        """Return a line with the verdict and the number of differences."""
        counts = {
            "different": len(self.different),
            "missing": len(self.missing),
            "unexpected": len(self.unexpected),
        }
        verdict = "the same" if self.equal else "not the same"
        compared = counted(len(self.tensors), "tensor")
        differences = (f", {count} {kind}" for kind, count in counts.items() if count)
        return f"<Comparison: {verdict}, {compared} compared{''.join(differences)}>"

    @property
    def equal(self) -> bool:
        """Whether names and tensors are equal, our names fit our config, and loading succeeds."""
        checks = (self.by_config, self.loading)
        is_complete = all(check is None or check.complete for check in checks)
        return is_complete and not (self.missing or self.unexpected or self.different)

    @property
    def different(self) -> tuple[TensorComparison, ...]:
        """The tensors that are not equal, the worst first."""
        return tuple(sorted((each for each in self.tensors if not each.equal), key=_badness))

    @property
    def with_nan(self) -> tuple[TensorComparison, ...]:
        """Our tensors that contain NaN."""
        return tuple(each for each in self.tensors if each.values and each.values.nans_ours)

    @property
    def all_zero(self) -> tuple[TensorComparison, ...]:
        """Our tensors that contain only zeros."""
        return tuple(each for each in self.tensors if each.values and each.values.all_zero_ours)


def _badness(tensor: TensorComparison) -> tuple[bool, bool, float, float, str]:
    """Return a sort key: other shapes and dtypes first, then NaN, then large differences."""
    values = tensor.values
    if values is None:
        return False, False, 0, 0, tensor.name
    same_type = tensor.cast or tensor.dtype_ours == tensor.dtype_theirs
    same_nans = values.nans_ours == values.nans_theirs
    share = values.different / max(values.elements, 1)
    return same_type, same_nans, -values.max_abs_diff, -share, tensor.name
