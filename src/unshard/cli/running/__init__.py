"""How a command begins and ends: streams, logs, errors and exit codes."""
