"""The configuration of a server: profiles, GPUs, allowed arguments."""
