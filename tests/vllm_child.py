"""What tests let a real vLLM do, in a process of an environment that has it.

    python vllm_child.py ORDERS ANSWERS

Orders are a JSON list of steps, done in this order; answers are a list of what came of each:

    {"do": "start", "arguments": {...}}      an engine of `vllm.LLM`, in place of the one before
    {"do": "serve", "checkpoint": ..., "options": {...}, "arguments": {...}}   the same, on shards
    {"do": "answer"}                              tokens and log-probabilities of some prompts
    {"do": "reload", "checkpoint": ..., "options": {...}}
        "skip": "all" or a prefix                 the reload loses this
        "stale": [module, row]                    a row of a module's parameters stays as it was
    {"do": "forbid_files"} and "allow_files"      whether files can have more than 4 KiB
    {"do": "change_interface"}                    what is used of vLLM is not there any more

An answer has "error", if there was one, "read": how many bytes this process read from files, and
"written": how many this process and those that it started, the engine's, gave to the kernel to
write since the step before.
"""

import json
import os
import resource
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

PROMPTS = [[5, 6, 7, 8], [100, 3, 50], [9, 200, 11, 12, 13, 14]]
FILE_BYTES = 4096
COMMON = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
    "seed": 0,
    "skip_tokenizer_init": True,
}


def written_bytes(process: str) -> int:
    """Return what a process and those that it started have written, through mapped files too."""
    total, directory = 0, Path("/proc") / process
    try:
        fields = dict(line.split(": ") for line in (directory / "io").read_text().splitlines())
        total += int(fields["wchar"]) + int(fields["write_bytes"])
        for children in directory.glob("task/*/children"):
            total += sum(map(written_bytes, children.read_text().split()))
    except OSError:
        pass  # it has ended, and its parent has counted what it wrote
    return total


def read_bytes() -> int:
    """Return what this process has read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


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
        self,
        checkpoint: str,
        options: dict[str, Any],
        skip: str | None = None,
        stale: tuple[str, int] | None = None,
    ) -> list[object]:
        from unshard.plugins.vllm import reload

        with ExitStack() as stack:
            if skip == "all":
                stack.enter_context(mock.patch.object(self.worker, "reload_weights"))
            elif stale is not None:
                self._leave(stack, *stale)
            elif skip is not None:
                self._lose(stack, skip)
            return list(reload(self.llm, checkpoint, **options))

    @property
    def worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker

    def _leave(self, stack: ExitStack, name: str, row: int) -> None:
        """Let a reload leave a row of each parameter of a module as it was."""
        whole = self.worker.reload_weights
        module = self.worker.model_runner.get_model().get_submodule(name)
        before = [one[row].clone() for one in module.parameters()]

        def most(**given: Any) -> None:
            whole(**given)
            for one, old in zip(module.parameters(), before, strict=True):
                one.data[row] = old

        stack.enter_context(mock.patch.object(self.worker, "reload_weights", most))

    def forbid_files(self) -> int | None:
        """Let no process write a longer file; return how an attempt fails.

        torch needs a file of some bytes to connect the processes of an engine, one or more. The
        modules that Python compiles when they are first imported are not saved: they would count.
        """
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
        try:
            Path("file").write_bytes(bytes(FILE_BYTES + 1))
        except OSError as error:
            return error.errno
        return None

    def allow_files(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def change_interface(self) -> None:
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        from unshard.plugins.vllm import register

        del DefaultModelLoader.get_all_weights
        del sys.modules["unshard.plugins.vllm_loader"]
        register()

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
    before, read_before = written_bytes("self"), read_bytes()
    for order in orders:
        answer: dict[str, object] = {}
        try:
            do = getattr(child, order.pop("do"))
            answer["result"] = do(**order)
        except Exception as error:  # noqa: BLE001 (the test decides)
            answer["error"] = f"{type(error).__name__}: {error}"
        now = written_bytes("self")
        read = read_bytes()
        answers.append({**answer, "written": now - before, "read": read - read_before})
        before, read_before = now, read
    child.allow_files()
    Path(sys.argv[2]).write_text(json.dumps(answers))
    child.stack.close()


if __name__ == "__main__":  # vLLM starts processes that import this module
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    main()
