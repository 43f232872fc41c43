"""What `torch.save` makes of a state dict: tensors, DTensors and ShardedTensors."""
