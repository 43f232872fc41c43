"""A stop rule for `on_result: command`: it stops a run whose metric has not risen for some steps.

    on_result:
      command: [python, /path/stop_when_worse.py, hellaswag/acc_norm, "3"]

It reads the result on stdin, keeps what it has seen of the run next to its checkpoints, and makes
the file `STOP` there. A trainer must look for that file, such as with this callback:

    class StopFile(transformers.TrainerCallback):
        def on_save(self, args, state, control, **_):
            stop = [os.path.exists(os.path.join(args.output_dir, "STOP"))]
            if torch.distributed.is_initialized():  # all ranks must stop at the same step
                torch.distributed.broadcast_object_list(stop, src=0)
            control.should_training_stop = control.should_training_stop or stop[0]
"""

import json
import sys
from pathlib import Path

metric, patience = sys.argv[1], int(sys.argv[2])
result = json.load(sys.stdin)
if result["status"] != "completed" or result["step"] is None or metric not in result["metrics"]:
    sys.exit(0)

run = Path(result["checkpoint"]).parent
seen_file = run / "stop_when_worse.json"
seen = json.loads(seen_file.read_text()) if seen_file.exists() else {}
seen[str(result["step"])] = result["metrics"][metric]  # twice for one step changes nothing
draft = seen_file.with_suffix(".draft")
draft.write_text(json.dumps(seen))
draft.replace(seen_file)

steps = sorted(seen, key=int)
best = max(steps, key=lambda step: seen[step])
if len(steps) - 1 - steps.index(best) >= patience:
    (run / "STOP").write_text(f"{metric} was best at step {best}: {seen[best]}\n")
