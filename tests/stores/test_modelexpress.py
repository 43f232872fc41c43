"""What `archive` writes into a store, applied by ModelExpress' own receiver: the merge itself.

All of it that runs without a GPU does: it finds the chain of versions, downloads a whole model and
deltas from S3, checks and applies them, and makes the result the active one. Its control plane (a
server in Rust, with Redis) is left out, so the records of versions come from here; and the engine
that would load the checkpoint.
"""

from pathlib import Path
from typing import Any

import pytest

import unshard
from bucket_server import BUCKET, Store
from ranks import save_ranks
from tiny_models import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


def save_steps(run: Path) -> None:
    """Save four steps of a model with experts as the ranks of verl do, 1 to 4 of them."""
    model = tiny_model("qwen3_moe", tie_word_embeddings=True).bfloat16()
    model.config.architectures = [type(model).__name__]
    for step in range(4):
        actor = run / f"global_step_{10 * step}" / "actor"
        save_ranks(actor, model.state_dict(), 1 + step)
        model.config.save_pretrained(actor / "huggingface")
        for parameter in model.parameters():
            parameter.data.view(-1)[step::9] *= 1.01


def versions(store: Store) -> dict[str, Any]:
    """Return the records of the versions of an archive, as the control plane has them."""
    from modelexpress_rl.control import WeightVersion, WeightVersionState
    from modelexpress_rl.object_storage import ObjectStorageSource, ObjectStorageType
    from modelexpress_rl.train import WeightPayloadFormat

    made = {}
    for number in range(4):
        name = f"weight_v{number:06d}"
        index = f"{name}/model.safetensors.index.json"
        assert index in store.files("archive")
        whole, delta = WeightPayloadFormat.FULL_HF_CHECKPOINT, WeightPayloadFormat.XOR_DELTA
        made[f"{number:06d}"] = WeightVersion(
            version_id=f"{number:06d}",
            model_name="model",
            payload_format=delta if number else whole,
            base_version_id=f"{number - 1:06d}" if number else None,
            object_storage=ObjectStorageSource(
                ObjectStorageType.S3, f"s3://{BUCKET}/archive/{index}"
            ),
            expected_source_slots=(),
            layout_signature="",
            state=WeightVersionState.READY,
            created_at_unix_ms=0,
        )
    return made


def receive(store: Store, cache: Path, known: dict[str, Any]) -> Path:
    """Let ModelExpress bring a cache without anything to version 3; return the checkpoint."""
    from modelexpress_rl.inference.methods import CanonicalDeltaUpdateMethod
    from modelexpress_rl.inference.receiver import (
        ObjectStorageGeneratorConfig,
        bootstrap_s3_checkpoint,
    )
    from modelexpress_rl.inference.source import ObjectStorageSourceResolver
    from modelexpress_rl.inference.version_chain import resolve_replay_chain
    from modelexpress_rl.object_storage import ObjectStorageType
    from modelexpress_rl.s3 import S3Client

    root, *deltas = resolve_replay_chain(
        target_version_id="000003", fetch_ready_version=known.__getitem__, max_chain_length=8
    )
    resolver, stored = ObjectStorageSourceResolver(), CanonicalDeltaUpdateMethod._version
    where = {"endpoint_url": store.endpoint, "region_name": "us-east-1"}
    s3 = S3Client(**where)
    try:
        seed = bootstrap_s3_checkpoint(
            model_name="model",
            version=stored(root, next(resolver.candidates(root))),
            refit_checkpoint_dir=cache,
            s3=s3,
        )
    finally:
        s3.close()
    method = CanonicalDeltaUpdateMethod(
        model_name="model",
        config=ObjectStorageGeneratorConfig(
            storage_type=ObjectStorageType.S3,
            initial_base_version_id=root.version_id,
            seed_checkpoint_path=seed,
            refit_checkpoint_dir=cache,
            **where,
        ),
    )
    try:
        chain = tuple((one, next(resolver.candidates(one))) for one in deltas)
        prepared = method.prepare_chain(chain)
        with method.installation_context(prepared):
            pass  # an engine would load the checkpoint here
        assert method._checkpoint.store.active_version() == "000003"
        path: Path = prepared.checkpoint.path
        return path
    finally:
        method.close()


def test_its_receiver_makes_the_merge_of_the_last_step(store: Store, tmp_path: Path) -> None:
    """Of fused experts the merge makes single ones, so the delta is of single ones, too."""
    run = tmp_path / "run"
    how: Any = {"max_shard_size": "8KB"}
    save_steps(run)
    archive = f"s3://{BUCKET}/archive"
    assert len(unshard.archive(run, archive, **how)) == 4
    assert unshard.archive(run, archive, **how) == []
    unshard.merge(run, tmp_path / "merged", **how)
    unshard.apply_delta(archive, [], tmp_path / "applied")
    known = versions(store)
    received = receive(store, tmp_path / "cache", known)
    truth = {one.name: one.read_bytes() for one in (tmp_path / "merged").glob("*.safetensors")}
    assert len(truth) > 1
    for output in (received, tmp_path / "applied"):
        assert {one.name: one.read_bytes() for one in output.glob("*.safetensors")} == truth
    start = "weight_v000003/model-00000-"
    name, stored = next(one for one in store.files("archive").items() if one[0].startswith(start))
    data = bytearray(stored)
    data[-3] ^= 4
    store.s3.put_object(Bucket=BUCKET, Key=f"archive/{name}", Body=bytes(data))
    with pytest.raises(RuntimeError, match="replay failed at revision '000003'"):
        receive(store, tmp_path / "again", known)
    with pytest.raises(unshard.CorruptError):
        unshard.apply_delta(archive, [], tmp_path / "no")
    assert not (tmp_path / "no").exists()
