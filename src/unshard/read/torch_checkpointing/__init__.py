"""Torch's successor of DCP: `<item>_<rank>.pt` or `.safetensors`, and `metadata.pkl`."""
