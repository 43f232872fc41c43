"""Several processes that run one plan: those of a torchrun, on one node or on several."""
