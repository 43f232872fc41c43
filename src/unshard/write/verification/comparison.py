"""What comparing two models found, tensor by tensor, as one object for people, JSON and callers."""

from dataclasses import dataclass

from unshard.showing import counted


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How far values may be apart: |ours - theirs| <= atol + rtol * |theirs|.

    Both 0 means exact: every bit must be equal, those of NaN and the sign of zero too. Otherwise
    NaN equals NaN, and an infinity equals itself only.

    Attributes:
        atol, rtol: as above.
        norms: whether equal values are measured, too: for norms and zeros, which takes longest.
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
    """What the elements of two tensors of equal shape are; computed in float64.

    Attributes:
        elements: how many there are.
        different: how many differ: in their bits, or by more than the tolerances allow.
        different_values: how many are not the same number; NaN is NaN here, and -0 is 0.
        max_abs_diff: largest |ours - theirs| where neither is NaN.
        max_rel_diff: largest |ours - theirs| / |theirs| there; infinite where theirs is 0.
        rms_diff: root of the mean square of ours - theirs, 0 where either is NaN.
        norm_ours, norm_theirs: Euclidean norms; NaN or infinite if any element is. `diff` has NaN.
        nans_ours, nans_theirs: how many elements are NaN.
        infs_ours, infs_theirs: how many are infinite.
        all_zero_ours, all_zero_theirs: whether every element is 0; False for an empty tensor, and
            in `diff`.
        delta_bytes: about what the XOR of both takes, compressed by zstd, which is estimated from
            even samples; in `diff` alone, and None without a zstd library.
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
    """Two tensors of one name.

    Attributes:
        name: of both.
        dtype_ours, dtype_theirs: as stored, or as a merge of the checkpoint would keep them.
        shape_ours, shape_theirs: elements per dimension.
        cast: dtypes differ and a merge may cast between them: theirs was cast to ours.
        equal: same shape, dtype the same or cast, and no element is different.
        values: of the elements; None where the shapes differ.
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
    """A tensor whose shape in the files is not the one that the model class expects."""

    name: str
    found: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loading:
    """What transformers reports when it loads the names and shapes of an output.

    Attributes:
        model_class: the class that the config names.
        missing: parameters that are not in the files.
        unexpected: tensors of the files that the class does not have.
        mismatched: tensors of another shape.
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
    """Our names and those that config.json implies.

    Attributes:
        missing: names that we do not have.
        unexpected: names that have no place in the model.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every name is there on both sides."""
        return not (self.missing or self.unexpected)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Two models, compared.

    Attributes:
        atol, rtol: the tolerances; both 0 for bits.
        tensors: every name that both have, in our order.
        missing: names that only they have; `unexpected`: names that only we have.
        by_config: our names compared with those of our config; None if it does not determine them.
        loading: the result of loading with transformers, if that was requested.
    """

    atol: float
    rtol: float
    tensors: tuple[TensorComparison, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    by_config: ByConfig | None = None
    loading: Loading | None = None

    def __repr__(self) -> str:
        """Return one line: the verdict, and what differs."""
        counts = (
            f", {len(names)} {what}"
            for what, names in (
                ("different", self.different),
                ("missing", self.missing),
                ("unexpected", self.unexpected),
            )
            if names
        )
        verdict = "the same" if self.equal else "not the same"
        compared = counted(len(self.tensors), "tensor")
        return f"<Comparison: {verdict}, {compared} compared{''.join(counts)}>"

    @property
    def equal(self) -> bool:
        """Whether both have the same names, and every tensor and the loading are as they should.

        Names that contradict our own config are not.
        """
        whole = all(one is None or one.complete for one in (self.by_config, self.loading))
        return whole and not (self.missing or self.unexpected or self.different)

    @property
    def different(self) -> tuple[TensorComparison, ...]:
        """The tensors that are not equal, the worst first."""
        return tuple(sorted((one for one in self.tensors if not one.equal), key=_how_good))

    @property
    def with_nan(self) -> tuple[TensorComparison, ...]:
        """Our tensors that contain NaN."""
        return tuple(one for one in self.tensors if one.values and one.values.nans_ours)

    @property
    def all_zero(self) -> tuple[TensorComparison, ...]:
        """Our tensors that contain only zeros."""
        return tuple(one for one in self.tensors if one.values and one.values.all_zero_ours)


def _how_good(one: TensorComparison) -> tuple[bool, bool, float, float, str]:
    """Return a key that sorts other shapes and dtypes first, then NaN, then large differences."""
    if one.values is None:
        return False, False, 0, 0, one.name
    same_type = one.cast or one.dtype_ours == one.dtype_theirs
    same_nans = one.values.nans_ours == one.values.nans_theirs
    share = one.values.different / max(one.values.elements, 1)
    return same_type, same_nans, -one.values.max_abs_diff, -share, one.name
