"""HTTP clients: `v1` of our protocol, `lmms` of lmms-eval's."""
