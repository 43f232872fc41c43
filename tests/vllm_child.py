"""What tests let a real vLLM do, in a process of an environment that has it.

    python vllm_child.py ORDERS ANSWERS

Orders are a JSON list of steps, done in this order; answers are a list of what came of each:

    {"do": "start", "arguments": {...}}      an engine of `vllm.LLM`, in place of the one before
    {"do": "serve", "checkpoint": ..., "options": {...}, "arguments": {...}}   the same, on shards
    {"do": "answer"}                              tokens and log-probabilities of some prompts
    {"do": "reload", "checkpoint": ..., "options": {...}, "skip": "all" or a layer's prefix}

An answer has "error", if there was one, and "written": how many bytes all threads of this process,
the engine's included, gave to the kernel to write since the step before.
"""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

PROMPTS = [[5, 6, 7, 8], [100, 3, 50], [9, 200, 11, 12, 13, 14]]
COMMON = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
    "seed": 0,
    "skip_tokenizer_init": True,
}


def written_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


class Child:
    def __init__(self) -> None:
        self.llm: Any = None
        self.stack = ExitStack()

    def start(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = None  # an engine ends when nothing refers to it
        self.llm = LLM(**{**COMMON, **arguments})

    def serve(
        self, checkpoint: str, options: dict[str, Any], arguments: dict[str, Any]
    ) -> dict[str, object]:
        from unshard.plugins.vllm import arguments as engine_arguments

        given = self.stack.enter_context(engine_arguments(checkpoint, **options))
        self.start({**given, **arguments})
        return dict(given)

    def answer(self) -> list[object]:
        from vllm import SamplingParams

        how = SamplingParams(
            temperature=0, max_tokens=8, logprobs=1, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": one} for one in PROMPTS]
        found = [one.outputs[0] for one in self.llm.generate(prompts, how, use_tqdm=False)]
        return [[list(one.token_ids), one.cumulative_logprob] for one in found]

    def reload(
        self, checkpoint: str, options: dict[str, Any], skip: str | None = None
    ) -> list[object]:
        from unshard.plugins.vllm import reload

        with ExitStack() as stack:
            if skip == "all":
                worker = self.llm.llm_engine.model_executor.driver_worker.worker
                stack.enter_context(mock.patch.object(worker, "reload_weights"))
            elif skip is not None:
                self._lose(stack, skip)
            return list(reload(self.llm, checkpoint, **options))

    def _lose(self, stack: ExitStack, prefix: str) -> None:
        """Let the loader lose what begins with a prefix, without a word."""
        from unshard.plugins.vllm_loader import UnshardLoader

        whole = UnshardLoader.get_all_weights

        def parts(*given: Any) -> Any:
            return (one for one in whole(*given) if not one[0].startswith(prefix))

        stack.enter_context(mock.patch.object(UnshardLoader, "get_all_weights", parts))


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    child, answers = Child(), []
    before = written_bytes()
    for order in orders:
        answer: dict[str, object] = {}
        try:
            do = getattr(child, order.pop("do"))
            answer["result"] = do(**order)
        except Exception as error:  # noqa: BLE001 (the test decides)
            answer["error"] = f"{type(error).__name__}: {error}"
        now = written_bytes()
        answers.append({**answer, "written": now - before})
        before = now
    Path(sys.argv[2]).write_text(json.dumps(answers))
    child.stack.close()


if __name__ == "__main__":  # vLLM starts processes that import this module
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    main()
