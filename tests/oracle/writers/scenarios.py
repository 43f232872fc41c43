"""All scenarios by name. A scenario writes the files of one rank and runs in every rank.

Its arguments are rank, world size and the checkpoint's directory; the process group is up when it
is called, and the generators are seeded. Scenarios are functions of modules, so that worker
processes find them by name.
"""

from collections.abc import Callable
from pathlib import Path

from oracle.writers import dcp, dcp_forms, dcp_tensor, fsdp1, mesh, model, tensor

__all__ = ["LAYOUTS", "RANK_FILES", "SCENARIOS", "Scenario"]

Scenario = Callable[[int, int, Path], None]

# One file per rank, `model_world_size_W_rank_R.pt`.
RANK_FILES: dict[str, Scenario] = {
    "dtensor_dtypes": tensor.dtensor_dtypes,
    "experts": mesh.experts,
    "fsdp1_flat_sharded": fsdp1.fsdp1_flat_sharded,
    "fsdp1_hybrid_no_mesh": fsdp1.fsdp1_hybrid_no_mesh,
    "fsdp1_local": fsdp1.fsdp1_local,
    "fsdp1_local_flat": fsdp1.fsdp1_local_flat,
    "fsdp1_mesh": model.fsdp1_mesh,
    "fsdp1_sharded": fsdp1.fsdp1_sharded,
    "fsdp2": model.fsdp2,
    "fsdp2_hsdp": model.fsdp2_hsdp,
    "fsdp2_tp": model.fsdp2_tp,
    "fsdp2_tp_uneven": model.fsdp2_tp_uneven,
    "hsdp_tp": mesh.hsdp_tp,
    "lone_strided": mesh.lone_strided,
    "noncontiguous": tensor.noncontiguous,
    "out_of_order": mesh.out_of_order,
    "out_of_order_uneven": mesh.out_of_order_uneven,
    "partial": tensor.partial,
    "plain_differ": tensor.plain_differ,
    "plain_equal": tensor.plain_equal,
}

# Anything else: directories of torch.distributed.checkpoint, files with other names.
LAYOUTS: dict[str, Scenario] = {
    "dcp_accelerate": dcp.dcp_accelerate,
    "dcp_app": dcp.dcp_app,
    "dcp_async": dcp_forms.dcp_async,
    "dcp_composer": dcp.dcp_composer,
    "dcp_corrupt": dcp_forms.dcp_corrupt,
    "dcp_fabric": dcp.dcp_fabric,
    "dcp_flat": dcp.dcp_flat,
    "dcp_fsdp1": fsdp1.dcp_fsdp1,
    "dcp_full": fsdp1.dcp_full,
    "dcp_hsdp": dcp_forms.dcp_hsdp,
    "dcp_lightning": dcp.dcp_lightning,
    "dcp_lightning_fsdp": dcp.dcp_lightning_fsdp,
    "dcp_many_files": dcp_forms.dcp_many_files,
    "dcp_model": dcp.dcp_model,
    "dcp_model_optimizer": dcp.dcp_model_optimizer,
    "dcp_nested": dcp_tensor.dcp_nested,
    "dcp_no_collectives": dcp_forms.dcp_no_collectives,
    "dcp_not_flattened": dcp_forms.dcp_not_flattened,
    "dcp_not_flattened_nested": dcp_forms.dcp_not_flattened_nested,
    "dcp_not_flattened_plain": dcp_forms.dcp_not_flattened_plain,
    "dcp_strides": dcp_tensor.dcp_strides,
    "dcp_tensors": dcp_tensor.dcp_tensors,
    "dcp_threads": dcp_forms.dcp_threads,
    "dcp_tp": dcp_forms.dcp_tp,
    "dcp_wrapped": dcp.dcp_wrapped,
    "dcp_zstd": dcp_forms.dcp_zstd,
    "fsdp1_sharded_bin": fsdp1.fsdp1_sharded_bin,
    "fsdp2_bin": fsdp1.fsdp2_bin,
    "megatron": dcp_forms.megatron,
}

SCENARIOS: dict[str, Scenario] = RANK_FILES | LAYOUTS
