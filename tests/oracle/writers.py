"""All scenarios by name. A scenario writes the files of one rank and runs in every rank.

Its arguments are rank, world size and the checkpoint's directory; the process group is up when it
is called, and the generators are seeded. Scenarios are functions of modules, so that worker
processes find them by name.
"""

from collections.abc import Callable
from pathlib import Path

from oracle import (
    dcp_forms,
    dcp_tensor_writers,
    dcp_writers,
    fsdp1_writers,
    mesh_writers,
    model_writers,
    tensor_writers,
)

__all__ = ["LAYOUTS", "RANK_FILES", "SCENARIOS", "Scenario"]

Scenario = Callable[[int, int, Path], None]

# One file per rank, `model_world_size_W_rank_R.pt`.
RANK_FILES: dict[str, Scenario] = {
    "dtensor_dtypes": tensor_writers.dtensor_dtypes,
    "experts": mesh_writers.experts,
    "fsdp1_flat_sharded": fsdp1_writers.fsdp1_flat_sharded,
    "fsdp1_hybrid_no_mesh": fsdp1_writers.fsdp1_hybrid_no_mesh,
    "fsdp1_local": fsdp1_writers.fsdp1_local,
    "fsdp1_local_flat": fsdp1_writers.fsdp1_local_flat,
    "fsdp1_mesh": model_writers.fsdp1_mesh,
    "fsdp1_sharded": fsdp1_writers.fsdp1_sharded,
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

# Anything else: directories of torch.distributed.checkpoint, files with other names.
LAYOUTS: dict[str, Scenario] = {
    "dcp_accelerate": dcp_writers.dcp_accelerate,
    "dcp_app": dcp_writers.dcp_app,
    "dcp_async": dcp_forms.dcp_async,
    "dcp_composer": dcp_writers.dcp_composer,
    "dcp_corrupt": dcp_forms.dcp_corrupt,
    "dcp_fabric": dcp_writers.dcp_fabric,
    "dcp_flat": dcp_writers.dcp_flat,
    "dcp_fsdp1": fsdp1_writers.dcp_fsdp1,
    "dcp_full": fsdp1_writers.dcp_full,
    "dcp_hsdp": dcp_forms.dcp_hsdp,
    "dcp_lightning": dcp_writers.dcp_lightning,
    "dcp_lightning_fsdp": dcp_writers.dcp_lightning_fsdp,
    "dcp_many_files": dcp_forms.dcp_many_files,
    "dcp_model": dcp_writers.dcp_model,
    "dcp_model_optimizer": dcp_writers.dcp_model_optimizer,
    "dcp_nested": dcp_tensor_writers.dcp_nested,
    "dcp_no_collectives": dcp_forms.dcp_no_collectives,
    "dcp_not_flattened": dcp_forms.dcp_not_flattened,
    "dcp_not_flattened_nested": dcp_forms.dcp_not_flattened_nested,
    "dcp_not_flattened_plain": dcp_forms.dcp_not_flattened_plain,
    "dcp_strides": dcp_tensor_writers.dcp_strides,
    "dcp_tensors": dcp_tensor_writers.dcp_tensors,
    "dcp_threads": dcp_forms.dcp_threads,
    "dcp_tp": dcp_forms.dcp_tp,
    "dcp_wrapped": dcp_writers.dcp_wrapped,
    "dcp_zstd": dcp_forms.dcp_zstd,
    "fsdp1_sharded_bin": fsdp1_writers.fsdp1_sharded_bin,
    "fsdp2_bin": fsdp1_writers.fsdp2_bin,
}

SCENARIOS: dict[str, Scenario] = RANK_FILES | LAYOUTS
