"""Whole models: safetensors or `torch.save`, in one file or several with an index."""
