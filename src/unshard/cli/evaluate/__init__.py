"""The commands of `unshard eval`."""
