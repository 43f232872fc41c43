"""Optimizers whose parameters have other names than the model's, or are in another directory."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

import unshard
from ranks import as_rank, assert_same, merged, save_ranks, shard
from unshard import NotMergeableError

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

HEADS, GROUPS, SIZE, WIDTH = 6, 2, 4, 10
ROWS = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def dcp(state: Mapping[str, Any], directory: Path, writer: Any = FileSystemWriter) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    more = {"save_distributed": True} if writer is HuggingFaceStorageWriter else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        save(dict(state), storage_writer=writer(str(directory), **more), no_dist=True)


def stepped(model: nn.Module, gradients: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return an AdamW of the trainable parameters after one step."""
    trained = [one for one in model.parameters() if one.requires_grad]
    decay = [[one for one in trained if (one.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    groups = zip(decay, (0.1, 0.0), strict=True)
    optimizer = torch.optim.AdamW(
        [{"params": own, "weight_decay": one} for own, one in groups if own]
    )
    for name, one in model.named_parameters():
        if one.requires_grad:
            one.grad = torch.randn_like(one) if gradients is None else gradients[name]
    optimizer.step()
    return optimizer


def state_of(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    with unshard.open_checkpoint(path, framework="pt", part="optimizer", **options) as found:
        return dict(found.items())


def moments(flat: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in flat.items() if name.startswith("state.")}


def problem(path: Path, **options: Any) -> str:
    found = unshard.inspect(path, **options).optimizer
    assert found is not None
    return found.problem or ""


# NeMo AutoModel: the optimizer is DCP next to sharded safetensors.


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("weights", "optim"),
    [
        ("epoch_0_step_7/model", "epoch_0_step_7/optim"),  # NeMo AutoModel
        ("global_step_7/actor/model", "global_step_7/actor/optim"),  # verl with its engine
        ("step_7/policy/weights/model", "step_7/policy/optimizer/optim"),  # NeMo-RL
    ],
)
@pytest.mark.parametrize("writer", [HuggingFaceStorageWriter, FileSystemWriter])
def test_the_optimizer_of_nemo_is_read_and_written_again(
    tmp_path: Path, weights: str, optim: str, writer: Any
) -> None:
    torch.manual_seed(0)
    model = Layers()
    flat = get_optimizer_state_dict(model, stepped(model), options=FLAT)
    dcp(model.state_dict(), tmp_path / weights, writer)
    dcp({"optim": flat, "sched": {"last_epoch": 7}}, tmp_path / optim)
    assert_same(state_of(tmp_path / weights), moments(flat))
    report = unshard.reshard(tmp_path / weights, tmp_path / "out", world_size=2, to="dcp")
    assert report.optimizer_tensors == len(moments(flat)) == 9
    assert_same(state_of(tmp_path / "out"), moments(flat))


def test_what_is_next_to_other_sharded_safetensors_is_not_theirs(tmp_path: Path) -> None:
    """Without `optim/` there is none, and one of another model is not taken for this one's."""
    model = Layers()
    dcp(model.state_dict(), tmp_path / "model", HuggingFaceStorageWriter)
    assert unshard.inspect(tmp_path / "model").optimizer is None
    other = nn.Linear(3, 3)
    dcp(
        {"optim": get_optimizer_state_dict(other, stepped(other), options=FLAT)}, tmp_path / "optim"
    )
    assert "that the model lacks" in problem(tmp_path / "model")


# torchtitan: the weights of wqkv are saved divided, its moments are not.


class Attention(nn.Module):
    """Projections of queries, keys and values, in one matrix or in three."""

    def __init__(self, *, bias: bool, is_fused: bool) -> None:
        super().__init__()
        rows = {"qkv": sum(ROWS.values())} if is_fused else ROWS
        for name, count in rows.items():
            setattr(self, f"w{name}", nn.Linear(WIDTH, count, bias=bias))


class Model(nn.Module):
    def __init__(self, *, bias: bool, is_fused: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(5, WIDTH)
        inner = nn.ModuleDict({"qkv_linear": Attention(bias=bias, is_fused=is_fused)})
        inner["wo"] = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
        self.layers = nn.ModuleList([nn.ModuleDict({"attention": inner})])


def divided(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as torchtitan's hook saves them: by head, then queries, key and value."""
    found: dict[str, torch.Tensor] = {}
    for name, one in tensors.items():
        if "wqkv." not in name or not one.ndim:
            found |= {name.replace("wqkv.", f"w{w}."): one for w in "qkv"}
            continue
        by_head = one.reshape(GROUPS, HEADS // GROUPS + 2, SIZE, *one.shape[1:])
        for w, part in zip(
            "qkv", torch.split(by_head, [HEADS // GROUPS, 1, 1], dim=1), strict=True
        ):
            found[name.replace("wqkv.", f"w{w}.")] = part.reshape(-1, *one.shape[1:])
    return found


def fused(*, bias: bool) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """Return a fused model, its flat state, and that of the same model not fused.

    Both are trained with the same gradients, so torch's own AdamW is the oracle.
    """
    torch.manual_seed(0)
    model, plain = (Model(bias=bias, is_fused=one) for one in (True, False))
    gradients = {name: torch.randn_like(one) for name, one in model.named_parameters()}
    plain.load_state_dict(divided(model.state_dict()))
    flat = get_optimizer_state_dict(model, stepped(model, gradients), options=FLAT)
    truth = get_optimizer_state_dict(plain, stepped(plain, divided(gradients)), options=FLAT)
    assert_same(divided(model.state_dict()), plain.state_dict())
    return model, flat, truth


def config_of(directory: Path, **more: object) -> None:
    fields = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, **more}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flattened state as `get_optimizer_state_dict` returns it without flattening."""
    state: dict[str, dict[str, Any]] = {}
    groups: dict[float, dict[str, Any]] = {}
    for name, value in flat.items():
        kind, _, rest = name.partition(".")
        owner, _, key = rest.rpartition(".")
        if kind == "state":
            state.setdefault(owner, {})[key] = value
        else:
            decay = flat[f"param_groups.{owner}.weight_decay"]
            group = groups.setdefault(decay, {"params": []})
            group[key] = value
            group["params"] += [] if owner in group["params"] else [owner]
    return {"state": state, "param_groups": [*groups.values()]}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_flat", [False, True])
def test_the_moments_of_wqkv_are_those_of_its_parts(
    tmp_path: Path, *, bias: bool, is_flat: bool
) -> None:
    model, flat, truth = fused(bias=bias)
    optimizer = flat if is_flat else nested(flat)
    dcp({**divided(model.state_dict()), "optimizer": optimizer}, tmp_path / "step-7")
    config_of(tmp_path / "step-7")
    assert_same(state_of(tmp_path / "step-7", names="training"), moments(truth))
    unshard.reshard(tmp_path / "step-7", tmp_path / "verl", world_size=3, to="verl")
    assert_same(state_of(tmp_path / "verl", names="training"), moments(truth))
    saved = torch.load(tmp_path / "verl" / "optim_world_size_3_rank_0.pt", weights_only=False)
    sizes = {one["weight_decay"]: len(one["params"]) for one in saved["param_groups"]}
    assert sizes == ({0.1: 5, 0.0: 3} if bias else {0.1: 5})


@pytest.mark.parametrize("world", [3, 7])
def test_shards_of_wqkv_may_end_in_the_middle_of_a_head(tmp_path: Path, world: int) -> None:
    model, flat, truth = fused(bias=True)
    save_ranks(tmp_path, divided(model.state_dict()), world)
    config_of(tmp_path)
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
            wrapped = {
                name.replace("qkv_linear", "qkv_linear._orig_mod"): shard(one, mesh, None)
                if isinstance(one, torch.Tensor) and one.ndim
                else one
                for name, one in flat.items()
            }
            torch.save(wrapped, tmp_path / f"optim_world_size_{world}_rank_{rank}.pt")
    assert_same(state_of(tmp_path, names="training"), moments(truth))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_merge_writes_the_moments_of_wqkv_as_it_writes_its_weights(
    tmp_path: Path, family: str
) -> None:
    """The oracle is a merge of models whose weights are the moments."""
    from safetensors.torch import load_file

    model, flat, truth = fused(bias=False)
    sizes = {"hidden_size": WIDTH, "head_dim": SIZE, "num_hidden_layers": 1, "vocab_size": 5}
    more = {**sizes, "model_type": family, "tie_word_embeddings": True}
    for name, one in {
        "run": {**divided(model.state_dict()), "optimizer": flat},
        **{
            kind: {
                name.removeprefix("state.").removesuffix(f".{kind}"): one
                for name, one in truth.items()
                if name.endswith(f".{kind}")
            }
            for kind in ("exp_avg", "exp_avg_sq")
        },
    }.items():
        dcp(one, tmp_path / name / "step-7")
        config_of(tmp_path / name / "step-7", **more)
    unshard.merge(tmp_path / "run", tmp_path / "out", optimizer=True, allow_missing=True)
    found = load_file(tmp_path / "out" / "optimizer.safetensors")
    for kind in ("exp_avg", "exp_avg_sq"):
        unshard.merge(tmp_path / kind, tmp_path / f"{kind}-out", allow_missing=True)
        own = merged(tmp_path / f"{kind}-out")
        assert "model.layers.0.self_attn.q_proj.weight" in own
        assert_same(
            {n: one for n, one in found.items() if n.endswith(f".{kind}")},
            {f"state.{n}.{kind}": one for n, one in own.items()},
        )


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {"num_attention_heads": None, "num_key_value_heads": None},
        {"num_key_value_heads": HEADS},
        {"num_key_value_heads": 3, "num_attention_heads": 9},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": "2"},
    ],
)
def test_wqkv_without_the_numbers_of_heads_is_not_readable(
    tmp_path: Path, fields: Mapping[str, object] | None
) -> None:
    model, flat, truth = fused(bias=False)
    dcp({**divided(model.state_dict()), "optimizer": flat}, tmp_path / "step-7")
    if fields is not None:
        config_of(tmp_path / "step-7", **fields)
    assert "cannot be divided into those of wq, wk and wv" in problem(tmp_path / "step-7")
    with pytest.raises(NotMergeableError, match=r"wqkv\.weight.*cannot be divided"):
        state_of(tmp_path / "step-7")
    config_of(tmp_path / "given")
    options = {"config": tmp_path / "given" / "config.json", "names": "training"}
    assert_same(state_of(tmp_path / "step-7", **options), moments(truth))


# The HF Trainer with PEFT: the weights are saved without the adapter's name, the moments with it.


class Peft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.proj = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.score = nn.Linear(6, 2)


def adapted(adapter: str, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    asked = {"target_modules": ["embed", "proj"], "init_lora_weights": False, **more}
    config = LoraConfig(r=2, **asked)
    model: Any = get_peft_model(Peft(), config, adapter_name=adapter)
    return model, stepped(model)


@pytest.mark.parametrize("adapter", ["default", "policy"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"modules_to_save": ["score"]},
        {"use_dora": True, "modules_to_save": ["score"]},
        {"trainable_token_indices": {"embed": [0, 3]}, "target_modules": ["proj"]},
    ],
)
def test_moments_of_an_adapter_are_read_and_counted(
    tmp_path: Path, adapter: str, more: Mapping[str, Any]
) -> None:
    model, optimizer = adapted(adapter, **more)
    saved = get_peft_model_state_dict(model, adapter_name=adapter)
    run = tmp_path / "checkpoint-7"
    dcp({"model": saved}, run / "pytorch_model_fsdp_0")
    full: Any = get_optimizer_state_dict(model, optimizer)
    dcp({"optimizer": full}, run / "optimizer_0")
    found = unshard.inspect(run).optimizer
    assert found is not None
    assert not found.problem
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert found.tensors == dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), len(trained))
    state = state_of(run, names="training")
    # The parameters of a model are objects, so each moment's owner is found by its values.
    for name in trained:
        (own,) = [key for key, one in saved.items() if torch.equal(one, model.get_parameter(name))]
        for kind, moment in full["state"][name].items():
            assert torch.equal(state[f"state.{own}.{kind}"], moment)
    report = unshard.reshard(run, tmp_path / "out", world_size=2)
    assert report.optimizer_tensors == 3 * len(trained)
    assert_same(state_of(tmp_path / "out", names="training"), state)


@pytest.mark.parametrize("adapter", ["default", "weight", "proj"])
@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["proj"], feedforward_modules=[]),
        LoHaConfig(r=2, target_modules=["proj"]),
        OFTConfig(r=0, oft_block_size=2, target_modules=["proj"]),
        VeraConfig(r=2, target_modules=["proj"]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_moments_of_the_other_methods_of_peft_are_read(
    tmp_path: Path, config: PeftConfig, adapter: str
) -> None:
    model: Any = get_peft_model(Peft(), config, adapter_name=adapter)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for one in trained.values():
        nn.init.normal_(one)
    full: Any = get_optimizer_state_dict(model, stepped(model))
    saved = get_peft_model_state_dict(model, adapter_name=adapter)
    dcp({"model": saved}, tmp_path / "checkpoint-7" / "pytorch_model_fsdp_0")
    dcp({"optimizer": full}, tmp_path / "checkpoint-7" / "optimizer_0")
    state = state_of(tmp_path / "checkpoint-7", names="training")
    assert len(state) == 3 * len(trained)
    for name, one in trained.items():
        (own,) = [key for key, value in saved.items() if torch.equal(value, one)]
        for kind, moment in full["state"][name].items():
            assert torch.equal(state[f"state.{own}.{kind}"], moment)


def test_two_adapters_that_become_one_are_not_readable(tmp_path: Path) -> None:
    model, _ = adapted("default")
    model.add_adapter("other", model.peft_config["default"])
    for name, one in model.named_parameters():
        one.requires_grad_("lora_" in name)
    saved = get_peft_model_state_dict(model, adapter_name="default")
    dcp({"model": saved}, tmp_path / "checkpoint-7" / "pytorch_model_fsdp_0")
    state = get_optimizer_state_dict(model, stepped(model))
    dcp({"optimizer": state}, tmp_path / "checkpoint-7" / "optimizer_0")
    assert "that the model lacks" in problem(tmp_path / "checkpoint-7")


# Flattened next to the model's own names: what is a moment is known by its group, not by its key.


def names_in(path: Path) -> set[str]:
    return {one.name for one in unshard.inspect(path).tensors}


@pytest.mark.parametrize("above", [None, "app"])
@pytest.mark.parametrize(
    "kind",
    [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.ASGD],
)
def test_moments_of_any_name_are_not_the_models(
    tmp_path: Path, kind: type[torch.optim.Optimizer], above: str | None
) -> None:
    torch.manual_seed(0)
    model = Layers()
    optimizer = kind(model.parameters())  # type: ignore[call-arg]  # each has defaults
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    optimizer.step()
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    saved = {**model.state_dict(), **flat}
    dcp(saved if above is None else {above: saved}, tmp_path / "step-7")
    assert names_in(tmp_path / "step-7") == {*model.state_dict()}
    assert_same(state_of(tmp_path / "step-7"), moments(flat))
    report = unshard.reshard(tmp_path / "step-7", tmp_path / "out", world_size=2)
    assert report.optimizer_tensors == len(moments(flat))
    assert names_in(tmp_path / "out") == {*model.state_dict()}
    assert_same(state_of(tmp_path / "out"), moments(flat))
