"""All scenarios by name. A scenario writes the file of one rank and runs in every rank.

Its arguments are rank, world size and the checkpoint's directory; the process group is up when it
is called, and the generators are seeded. Scenarios are functions of modules, so that worker
processes find them by name.
"""

from collections.abc import Callable
from pathlib import Path

from oracle import mesh_writers, model_writers, tensor_writers

__all__ = ["SCENARIOS", "Scenario"]

Scenario = Callable[[int, int, Path], None]

SCENARIOS: dict[str, Scenario] = {
    "dtensor_dtypes": tensor_writers.dtensor_dtypes,
    "experts": mesh_writers.experts,
    "fsdp1_mesh": model_writers.fsdp1_mesh,
    "fsdp2": model_writers.fsdp2,
    "fsdp2_hsdp": model_writers.fsdp2_hsdp,
    "fsdp2_tp": model_writers.fsdp2_tp,
    "fsdp2_tp_uneven": model_writers.fsdp2_tp_uneven,
    "hsdp_tp": mesh_writers.hsdp_tp,
    "lone_strided": mesh_writers.lone_strided,
    "noncontiguous": tensor_writers.noncontiguous,
    "out_of_order": mesh_writers.out_of_order,
    "out_of_order_uneven": mesh_writers.out_of_order_uneven,
    "partial": tensor_writers.partial,
    "plain_differ": tensor_writers.plain_differ,
    "plain_equal": tensor_writers.plain_equal,
}
