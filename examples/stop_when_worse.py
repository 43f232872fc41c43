"""A stop rule for `on_result`: runs a command for a run that has not improved for N evaluations.

    on_result: [python3, /path/stop_when_worse.py, hellaswag/acc_norm, "3", scancel, "--name={run}"]

The command ends the training; {run} is replaced by the run's name. The rule repeats it for each
later result that is not better. With "-" before the metric, lower values are better. The rule
treats each profile and each set of weights (model, EMA) separately, and keeps the results of a run
in the run's `_unshard/`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def put(path: Path, text: str) -> None:
    """Write a file in one step. What is there may be a link that somebody made: it is replaced."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as draft:
        draft.write(text)
    Path(draft.name).chmod(0o644)
    Path(draft.name).replace(path)


metric, patience = sys.argv[1].removeprefix("-"), int(sys.argv[2])
sign = -1 if sys.argv[1].startswith("-") else 1
result = json.load(sys.stdin)
if result["status"] != "completed" or result["step"] is None or metric not in result["metrics"]:
    sys.exit(0)

# A checkpoint is inside its run's directory, except the base model (step 0).
states = [parent / "_unshard" for parent in Path(result["checkpoint"]).parents[:3]]
state = next((one for one in states if one.is_dir() and not one.is_symlink()), None)
if state is None:
    sys.exit(0)

series = f"{result['profile']}-{result['weights']}-{metric}"
name = "".join(letter if letter.isalnum() else "-" for letter in series)
seen_file = state / f"stop-rule-{name}.json"
seen = json.loads(seen_file.read_text()) if seen_file.exists() else {}
seen[str(result["step"])] = result["metrics"][metric]  # a repeated result changes nothing
put(seen_file, json.dumps(seen))

steps = sorted(seen, key=int)  # results may come in any order
best = max(steps, key=lambda step: sign * seen[step])
if len(steps) - 1 - steps.index(best) >= patience:
    print(f"{metric} was best at step {best}: {seen[best]}")
    command = [part.replace("{run}", str(result["run"])) for part in sys.argv[3:]]
    sys.exit(subprocess.run(command, check=False).returncode)  # noqa: S603  (the operator's own)
