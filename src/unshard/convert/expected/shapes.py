"""The shapes of tensors by the fields of a config, as a table. Pure.

`@` begins the rows of some types, `*` of all decoders: ends of names, without `.weight`, and the
dimensions of the weight; a bias has the first dimension. The first row that fits counts. `a/b` is
rounded down, `[]` counts a list. `~`: some versions of transformers swap the last two dimensions.
"""

import math
from collections.abc import Sequence
from functools import cache

from unshard.convert.expected.decoders import DECODERS, NotKnownError
from unshard.read.model_config import Fields

_WORDS = """
H = hidden_size; I = intermediate_size; M = moe_intermediate_size; A = num_attention_heads;
Q = A*head_dim; KV = num_key_value_heads*head_dim; QK = A*qk_nope_head_dim+A*qk_rope_head_dim;
LA = linear_num_value_heads; LV = LA*linear_value_head_dim; SHARED = n_shared_experts*M;
ONE = shared_expert_intermediate_size; EMBED = embed_dim*MERGED;
LK = linear_num_key_heads*linear_key_head_dim; MERGED = spatial_merge_size*spatial_merge_size;
GRID = image_size.0/patch_size.0*image_size.1/patch_size.1; SEEN = vision_config.hidden_size;
TEXT = text_config.hidden_size; SCALED = SEEN*1/downsample_ratio*1/downsample_ratio;
E = num_experts; num_experts = num_local_experts; num_local_experts = n_routed_experts;
num_key_value_heads = A llama granite arcee phi3 olmo olmo2 olmo3 olmoe; n_inner = 4*n_embd gpt2;
head_dim = H/A llama granite smollm3 mistral qwen2 arcee phi3 olmo olmo2 olmo3 starcoder2 mixtral
qwen2_moe qwen3_moe olmoe glm4_moe dots1
"""
"""The value of a word that is missing in the config, for all types or for the types listed.

The types listed compute a missing field. Other types have defaults, which differ by version."""
_ROWS = """
@ olmo2 olmo3: q_norm = Q; k_norm = KV @ mixtral: w1 w3 = I H; w2 = H I
@ olmoe: q_norm = H; k_norm = num_key_value_heads*H/A;
experts.#.gate_proj experts.#.up_proj = I H; experts.#.down_proj = H I
@ deepseek_v2 deepseek_v3: q_a_layernorm = q_lora_rank; kv_a_layernorm = kv_lora_rank;
q_a_proj = q_lora_rank H; q_b_proj = QK q_lora_rank; q_proj = QK H; o_proj = H A*v_head_dim;
kv_a_proj_with_mqa = kv_lora_rank+qk_rope_head_dim H; kv_b_proj = A*qk_nope_head_dim+A*v_head_dim
kv_lora_rank
@ qwen2_vl_text qwen2_5_vl_text: q_proj o_proj = H H; k_proj v_proj = num_key_value_heads*H/A H
@ qwen3_next qwen3_5_text qwen3_5_moe_text: q_proj = 2*Q H; dt_bias A_log = LA;
linear_attn.norm = linear_value_head_dim; conv1d = 2*LK+LV 1 linear_conv_kernel_dim;
in_proj_qkvz = 2*LK+2*LV H; in_proj_qkv = 2*LK+LV H; in_proj_z = LV H; out_proj = H LV;
in_proj_ba = 2*LA H; in_proj_b in_proj_a = LA H
@ qwen3_vl_moe_text: ~experts.gate_up_proj = E 2*M H; ~experts.down_proj = E H M
@ gpt_oss llama4_text: experts.gate_up_proj = E H 2*I; experts.down_proj = E I H;
gate_up_proj_bias = E 2*I; down_proj_bias router = E H; sinks = A
@ llama4_text: shared_expert.gate_proj shared_expert.up_proj = I H; shared_expert.down_proj = H I;
gate_proj up_proj = intermediate_size_mlp H; down_proj = H intermediate_size_mlp
@ gpt2: wte = vocab_size n_embd; wpe = n_positions n_embd; ln_f ln_1 ln_2 ln_cross_attn = n_embd;
crossattention.c_attn.bias = 2*n_embd; crossattention.c_attn = n_embd 2*n_embd;
q_attn = n_embd n_embd; c_attn.bias = 3*n_embd; c_attn = n_embd 3*n_embd; c_fc.bias = n_inner;
c_fc = n_embd n_inner; c_proj.bias = n_embd; mlp.c_proj = n_inner n_embd; c_proj = n_embd n_embd
@ *: embed_tokens = vocab_size H; q_norm k_norm = head_dim; norm = H; q_proj = Q H; o_proj = H Q;
qkv_proj = Q+2*KV H; k_proj v_proj = KV H; .gate = E H; e_score_correction_bias = E;
experts.#.gate_proj experts.#.up_proj = M H; experts.#.down_proj = H M; shared_expert_gate = 1 H;
shared_experts.gate_proj shared_experts.up_proj = SHARED H; shared_experts.down_proj = H SHARED;
shared_expert.gate_proj shared_expert.up_proj = ONE H; shared_expert.down_proj = H ONE;
gate_up_proj = 2*I H; gate_proj up_proj c_fc = I H; down_proj c_proj = H I
@ qwen2_vl: patch_embed.proj = embed_dim in_channels temporal_patch_size patch_size patch_size;
norm1 norm2 ln_q = embed_dim; qkv = 3*embed_dim embed_dim; attn.proj = embed_dim embed_dim;
fc1 = embed_dim*mlp_ratio embed_dim; fc2 = embed_dim embed_dim*mlp_ratio; mlp.0 = EMBED EMBED;
mlp.2 = H EMBED
@ qwen3_vl_deepstack: norm = H*MERGED @ clip_vision_model: position_embedding = GRID+1 H
@ qwen2_5_vl qwen3_vl qwen3_5 qwen3_vl_deepstack: norm norm1 norm2 ln_q = H; qkv = 3*H H;
patch_embed.proj = H in_channels temporal_patch_size patch_size patch_size; attn.proj = H H;
pos_embed = num_position_embeddings H; gate_proj up_proj mlp.linear_fc1 = I H;
down_proj mlp.linear_fc2 = H I; mlp.0 linear_fc1 = H*MERGED H*MERGED;
mlp.2 linear_fc2 = out_hidden_size H*MERGED
@ clip_vision_model siglip_vision_model internvl_vision: position_embedding = GRID H;
patch_embedding projection = H num_channels patch_size.0 patch_size.1; in_proj_weight = 3*H H;
position_embeddings = 1 GRID+1 H; cls_token mask_token probe = 1 1 H; in_proj_bias = 3*H;
q_proj k_proj v_proj out_proj projection_layer = H H; fc1 = I H; fc2 = H I;
class_embedding lambda_1 lambda_2 norm norm1 norm2 before after = H
@ llava llava_next llava_onevision: linear_1 = TEXT SEEN*vision_feature_layer[];
linear_2 = TEXT TEXT; image_newline = TEXT
@ internvl: layer_norm = SCALED; linear_1 = TEXT SCALED; linear_2 = TEXT TEXT
@ gemma3: mm_input_projection_weight = SEEN TEXT; mm_soft_emb_norm = SEEN
"""
_INSTEAD = {
    word.strip(): text.split() for word, text in (row.split("=") for row in _WORDS.split(";"))
}


@cache
def _rows_of(kind: str) -> list[tuple[str, list[str]]]:
    """Return the ends of names with their dimensions for a type, in the order of the table."""
    dims_by_end: list[tuple[str, list[str]]] = []
    for block in _ROWS.split("@")[1:]:
        kinds, rows = block.split(":")
        if kind in (DECODERS if "*" in kinds else kinds.split()):
            for ends, dims in (row.split("=") for row in rows.split(";")):
                dims_by_end += ((end, dims.split()) for end in ends.split())
    return dims_by_end


class ConfigShape(tuple[int, ...]):  # noqa: SLOT001 (a tuple can have none)
    """A shape in elements, the config fields that determine it, and another correct shape."""

    fields: tuple[str, ...]
    other: tuple[int, ...] | None


def shape_in_config(kind: str, name: str, config: Fields) -> ConfigShape | None:
    """Return the shape of a tensor in a component of this type; None if it is unknown.

    `name` does not have the component's prefix, and has "#" for the numbers of layers and experts.
    """
    path, _, end = name.rpartition(".")
    ends = (name, path) if end in ("weight", "bias") else (name,)
    for row, dims in _rows_of(kind):
        key, fields = row.removeprefix("~"), dict[str, None]()
        if any(own.endswith(key) for own in ends):
            sizes = dims[:1] if end == "bias" and not key.endswith(end) else dims
            try:
                shape = ConfigShape(int(_size(dim, kind, config, fields)) for dim in sizes)
            except NotKnownError:
                return None
            shape.fields = tuple(fields)
            shape.other = None if key == row else (shape[0], *shape[:0:-1])
            return shape
    return None


def _size(text: str, kind: str, config: Fields, fields: dict[str, None]) -> float:
    """Return the value of a dimension or of a part of it, and add its config fields to `fields`.

    Raises:
        NotKnownError: a field is missing in the config, or is not a size.
    """
    for mark, join in (("+", sum), ("*", math.prod)):
        if mark in text:
            return join(_size(part, kind, config, fields) for part in text.split(mark))
    if "/" in text:
        above, below = (_size(part, kind, config, fields) for part in text.split("/"))
        return int(above / below)
    if text.isdigit():
        return int(text)
    substitute, *kinds = _INSTEAD.get(text, [""])
    if substitute and config.get(text) is None and (kind in kinds or not kinds):
        return _size(substitute, kind, config, fields)
    path = text.removesuffix("[]").split(".")
    fields[".".join(key for key in path if not key.isdigit())] = None
    value = _inside(config, path)
    if text.endswith("[]"):
        value = len(value) if isinstance(value, list) else isinstance(value, int) and 1
    if not isinstance(value, int | float) or value is True or not 1e-3 < value < 2**40:
        raise NotKnownError  # a larger size is a typo, or an attack
    return value


def _inside(value: object, path: Sequence[str]) -> object:
    """Return a value in nested configs and lists; a number applies to every element."""
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list):
            value = dict(zip("01", value, strict=False)).get(key)
    return value
