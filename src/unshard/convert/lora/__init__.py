"""LoRA: fuse adapters into their base, or write them separately."""
