"""The files next to the weights: config, tokenizer, base model, adapter config."""
