"""Files of `torch.save`: zips, and the legacy format before torch 1.6."""
