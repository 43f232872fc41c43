"""File formats: torch.save's zip, pickles, safetensors, JSON. Bytes only, not checkpoints."""
