"""What tests let a real SGLang do, in a process of an environment that has it.

    python sglang_child.py ORDERS ANSWERS

Orders are a JSON list of steps, done in this order; answers are a list of what came of each, which
is written after every step, because an engine may end this process:

    {"do": "serve", "checkpoint": ..., "options": {...}, "arguments": {...}}   an engine on shards
    {"do": "answer"}                              tokens and log-probabilities of some prompts
    {"do": "update", "path": ..., "load_format": ..., "lose": how often to lose a layer}
"""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_child import PROMPTS

COMMON = {
    "attention_backend": "torch_native",
    "context_length": 64,
    "device": "cpu",
    "disable_cuda_graph": True,
    "dtype": "float32",
    "log_level": "warning",
    "max_running_requests": 4,
    "max_total_tokens": 2048,
    "mem_fraction_static": 0.1,
    "sampling_backend": "pytorch",
    "skip_tokenizer_init": True,
}
LOST = "model.layers.1."


class Child:
    def __init__(self) -> None:
        self.engine: Any = None
        self.stack = ExitStack()

    def serve(
        self, checkpoint: str, options: dict[str, Any], arguments: dict[str, Any]
    ) -> dict[str, object]:
        import sglang

        from unshard.plugins.sglang import arguments as engine_arguments

        given = self.stack.enter_context(engine_arguments(checkpoint, **options))
        self.engine = sglang.Engine(**given, **COMMON, **arguments)
        return given

    def answer(self) -> list[object]:
        how = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        found = self.engine.generate(input_ids=PROMPTS, sampling_params=how, return_logprob=True)
        return [
            [one["output_ids"], [row[0] for row in one["meta_info"]["output_token_logprobs"]]]
            for one in found
        ]

    def update(self, path: str, load_format: str = "unshard", lose: int = 0) -> list[object]:
        Path(os.environ["LOSE"]).write_text(str(lose))
        return list(self.engine.update_weights_from_disk(path, load_format=load_format))


def plugin() -> None:
    """Let the loader lose a layer without a word, or fail in the second worker: as a file says."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "unshard.plugins.sglang_loader.UnshardLoader._tensors"
    HookRegistry.register(target, _lose, HookType.AROUND)


def _lose(original: Any, *given: Any) -> Any:
    times = Path(os.environ["LOSE"])
    if times.read_text() == "second worker fails":
        return _fail(original, *given)
    left = int(times.read_text())
    if left:  # several workers read it
        times.write_text(str(left - 1))
    return (one for one in original(*given) if not (left and one[0].startswith(LOST)))


def _fail(original: Any, *given: Any) -> Any:
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank == 1:
        raise OSError("no such device")
    yield from original(*given)


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    child, answers = Child(), []
    for order in orders:
        do = getattr(child, order.pop("do"))
        answers.append(do(**order))
        Path(sys.argv[2]).write_text(json.dumps(answers))
    child.engine.shutdown()
    child.stack.close()


if __name__ == "__main__":  # SGLang starts processes that import this module
    main()
