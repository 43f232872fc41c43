"""File formats: torch.save's zip, its pickle, and safetensors. They know bytes, not checkpoints."""
