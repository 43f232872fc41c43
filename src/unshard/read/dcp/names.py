"""Names of DCP's files, and the keys under which trainers save their state."""

import re

ACCELERATE = "pytorch_model_fsdp_"
"""The start of accelerate's folders."""

METADATA = re.compile(r"(?:__\d+)?\.metadata")
UNFINISHED = re.compile(r"(?:__\d+)?\.metadata\.tmp")

MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")
"""The key of the model in the dict that trainers save."""
OTHER_KEYS = frozenset(
    """
    callbacks dataloader dataset ema ema_model extra_state grad_scaler integrations loops
    lr_scheduler lr_schedulers metadata model_ema random_states rng rng_state sampler scaler
    scheduler schedulers timestamp train_state trainer trainer_state
    """.split()
)
"""The keys of training state in it, and of the average of a model."""
