"""From a checkpoint to metrics: merge, evaluate, judge how it ended."""
