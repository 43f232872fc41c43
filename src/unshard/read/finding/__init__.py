"""Where the weights are that a path means, whatever the folders are called."""
