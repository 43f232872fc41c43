"""Files of `torch.save`: zips, and the formats before torch 1.6."""
