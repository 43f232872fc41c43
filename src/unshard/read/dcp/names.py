"""The names of DCP's files, and those that trainers give the parts of what they save."""

import re

ACCELERATE = "pytorch_model_fsdp_"
"""What accelerate's folders start with."""

METADATA = re.compile(r"(?:__\d+)?\.metadata")
UNFINISHED = re.compile(r"(?:__\d+)?\.metadata\.tmp")

MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")
"""What trainers call the model in the dict that they save."""
OTHER_KEYS = frozenset(
    """
    callbacks dataloader dataset ema ema_model extra_state grad_scaler integrations loops
    lr_scheduler lr_schedulers metadata model_ema random_states rng rng_state sampler scaler
    scheduler schedulers timestamp train_state trainer trainer_state
    """.split()
)
"""What trainers call training state in it, and the average of a model."""
