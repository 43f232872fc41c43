"""The scale of an adapter's updates: its alpha and rank, never guessed.

PEFT's rule: a pair's update is scaled by alpha / rank, or by alpha / sqrt(rank) with rslora. Both
numbers may differ by module: patterns are matched against the end of its name.
Source: LoraModel._create_and_replace and peft.utils.other.get_pattern_key (0.21).
"""

import math
from collections.abc import Mapping
from typing import TypeVar

from unshard.convert.lora.patterns import ends_like
from unshard.errors import ConversionError, UsageError
from unshard.read.beside.adapter_config import AdapterConfig

__all__ = ["alpha_note", "check_rank", "known_alpha", "scale_of"]

_T = TypeVar("_T")

_MANY = 10_000


def known_alpha(config: AdapterConfig | None, alpha: float | None) -> float:
    """Return the adapter's alpha: the user's, else that of its config.

    Raises:
        UsageError: the user's is not a positive number.
        ConversionError: neither is known.
    """
    if alpha is not None:
        if not math.isfinite(alpha) or alpha <= 0:
            raise UsageError(f"--lora-alpha {alpha}: not a positive number")
        return alpha
    if config is not None and config.alpha is not None:
        return config.alpha
    if config is None:
        found = "neither lora_train_meta.json nor adapter_config.json"
    else:
        stated = config.fields.get("lora_alpha")
        found = f"{config.source} says {'nothing' if stated is None else stated}"
    raise ConversionError(
        "the LoRA adapter's alpha is not known, and its updates are scaled by alpha / rank",
        expected="a positive lora_alpha",
        found=found,
        hint="give the one that the adapter was trained with: --lora-alpha N",
    )


def alpha_note(config: AdapterConfig | None, alpha: float | None) -> tuple[str, ...]:
    """Return a note if the user's alpha differs from that of the config."""
    if alpha is None or config is None or config.alpha in {None, alpha}:
        return ()
    return (f"--lora-alpha {alpha:g} replaces {config.alpha:g} in {config.source}",)


def scale_of(name: str, rank: int, config: AdapterConfig | None, alpha: float) -> float:
    """Return the factor of a pair's update.

    Args:
        name: the adapted module; of a bare parameter, the parameter.
        rank: the pair's.
        config: the adapter's.
        alpha: of modules that no pattern matches.

    Raises:
        ConversionError: a pattern is not safe to match, or its alpha is 0.
    """
    if config is None:
        return alpha / rank
    own = _matched(config.alpha_pattern, name)
    if own == 0:
        raise ConversionError(f"{config.source}: alpha_pattern says 0 for {name}")
    own = alpha if own is None else own
    return own / math.sqrt(rank) if config.use_rslora else own / rank


def check_rank(name: str, rank: int, config: AdapterConfig | None) -> None:
    """Check that a pair has the rank that the config states.

    Raises:
        ConversionError: it does not.
    """
    if config is None:
        return
    stated = _matched(config.rank_pattern, name)
    stated = config.rank if stated is None else stated
    if stated is not None and stated != rank:
        raise ConversionError(
            f"the LoRA pair of {name} does not have the rank that {config.source} states",
            expected=f"rank {stated}",
            found=f"rank {rank}",
            hint="the file or the tensors belong to another run",
        )


def _matched(patterns: Mapping[str, _T], name: str) -> _T | None:
    """Return the value of the first pattern that matches the end of a module's name."""
    if len(patterns) > _MANY:
        raise ConversionError(
            f"rank_pattern or alpha_pattern has {len(patterns)} patterns",
            expected=f"at most {_MANY}",
        )
    return next((value for pattern, value in patterns.items() if ends_like(pattern, name)), None)
