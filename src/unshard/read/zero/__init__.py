"""DeepSpeed's ZeRO checkpoints: partitions of flattened parameters, a file per rank."""
