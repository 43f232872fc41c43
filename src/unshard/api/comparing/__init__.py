"""Compare checkpoints with one another, and apply their differences, without a merge."""
