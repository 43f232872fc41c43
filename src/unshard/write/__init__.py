"""From a plan to a finished directory: execute, stage and commit, companions, record, verify."""
