"""One file of `torch.save` per rank: verl, lmms-engine, FSDP1."""
