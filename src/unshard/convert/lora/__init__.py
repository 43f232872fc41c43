"""LoRA: adapters fused into their base, or written by themselves."""
