#!/bin/sh
# Merge the checkpoint that ships with the project, in an environment without torch.
set -eu
run() {
    printf '\n$ %s\n' "$*"
    "$VENV/bin/$@"
}
if "$VENV/bin/python" -c "import torch" 2>/dev/null; then
    echo "error: torch is installed in $VENV, so this would show nothing" >&2
    exit 1
fi
echo "torch is not installed in $VENV."
run unshard inspect examples/checkpoint
run unshard merge examples/checkpoint "$OUTPUT"
printf '\n$ ls -l %s\n' "$OUTPUT"
ls -l "$OUTPUT"
run python examples/check_result.py "$OUTPUT" examples/expected.json
