"""The rules of the house that a parser can check: who imports whom, and how long things may be."""

import ast
import builtins
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeVar

import pytest

import unshard

pytestmark = pytest.mark.xdist_group("sources")  # they are parsed once

SOURCE = Path(unshard.__file__).parent

# A module may import from its own room and from rooms further down; a `__main__`, which no module
# imports, from any: `merger/` has one, a command line as those of `compat/`.
ROOMS = (
    {"cli", "compat"},
    {"evaluate"},
    {"integrations"},
    {"merger"},
    {"plugins"},
    {"api"},
    {"engines"},
    {"write"},
    {"plan"},
    {"convert"},
    {"read"},
    {"containers"},
    {"stores"},
    {"tensors"},
    {"console"},
    {"errors", "fronts", "keywords", "progress", "signals", "with_notes", "_version"},
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
DOORS = {"__init__", "__main__"}
LONGEST_MODULE = 400
LONGEST_FUNCTION = 40
MOST_MODULES = 12
HEAVY = {"torch", "transformers", "accelerate", "ray", "sglang", "vllm"}
# These import them in functions only, or are imported by those only who have them (callbacks);
# their own tests show it.
ON_DEMAND = {
    "write.verification.load",
    "engines.libraries",
    "engines.into_torch",
    "engines.into_transformers",
    "engines.ray.cluster",
    "evaluate.callbacks.transformers",
    "evaluate.server.warm.worker",
    "integrations.transformers",
    "stores.nodes.connection",
    "stores.nodes.readers",
    "plugins.sglang",
    "plugins.sglang_check",
    "plugins.sglang_loader",
    "plugins.vllm",
    "plugins.fused_experts",
    "plugins.vllm_loader",
    "plugins.vllm_worker",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef

MODULES = sorted(SOURCE.rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def room_of(module: str) -> str:
    """Return the room of a module named without its leading `unshard.`."""
    return module.split(".", maxsplit=1)[0]


IN_ROOMS = [path for path in MODULES if dotted(path) not in DOORS]
SAYING = [path for path in IN_ROOMS if room_of(dotted(path)) in {"cli", "compat", "merger"}]
COMMANDS = [path for path in IN_ROOMS if room_of(dotted(path)) in {"cli", "api"}]
BELOW_API = [path for path in IN_ROOMS if path not in COMMANDS]
SILENT = [path for path in IN_ROOMS if path not in SAYING]

Found = TypeVar("Found")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def offences(paths: Sequence[Path], rule: Callable[[Path], Found]) -> dict[str, Found]:
    """Return what a rule finds in the modules in which it finds anything."""
    assert len(paths) > 20
    found = {dotted(path): rule(path) for path in paths}
    return {name: one for name, one in found.items() if one}


@cache
def imported(tree: ast.Module) -> list[str]:
    """Return the full names of all modules that are imported, inside functions too."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if node.module == "unshard":
                names += [f"unshard.{alias.name}" for alias in node.names]
            else:
                names.append(node.module or "")
    return names


def rooms_imported(tree: ast.Module) -> set[str]:
    inside = (name.removeprefix("unshard.") for name in imported(tree) if is_ours(name))
    return {room_of(name) for name in inside if name != "unshard"}


def is_ours(name: str) -> bool:
    return name == "unshard" or name.startswith("unshard.")


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """Count a function's lines from `def` on, without its docstring."""
    first = function.body[0]
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def signature_length(function: Function) -> int:
    return function.body[0].lineno - function.lineno


def test_a_module_imports_only_from_its_own_room_and_those_below() -> None:
    def above(path: Path) -> set[str]:
        own = LEVELS[room_of(dotted(path))]
        return {room for room in rooms_imported(tree_of(path)) if LEVELS.get(room, own) < own}

    assert offences([path for path in IN_ROOMS if path.stem != "__main__"], above) == {}


def test_a_module_imports_only_from_known_rooms() -> None:
    """`from unshard import __version__` is the one name that the package itself may give."""
    known = set(LEVELS) | {"__version__"}
    assert offences(MODULES, lambda path: rooms_imported(tree_of(path)) - known) == {}


def test_every_module_is_in_a_room() -> None:
    found = {room_of(dotted(path)) for path in MODULES} - DOORS
    assert found <= set(LEVELS)
    assert {"api", "tensors", "plan", "errors"} <= found


def test_a_module_has_at_most_400_lines() -> None:
    def too_many(path: Path) -> int:
        return max(0, len(path.read_text(encoding="utf-8").splitlines()) - LONGEST_MODULE)

    assert offences(MODULES, too_many) == {}


def test_a_folder_has_at_most_12_modules_and_no_three_with_one_prefix() -> None:
    folders: dict[Path, list[str]] = {}
    for path in MODULES:
        if dotted(path) not in DOORS and path.name != "__init__.py":
            folders.setdefault(path.parent, []).append(path.stem)
    assert len(folders) > 20
    crowded = {str(folder) for folder, names in folders.items() if len(names) > MOST_MODULES}
    assert crowded == set()
    for folder, names in folders.items():
        prefixes = Counter(name.split("_")[0] for name in names if "_" in name.strip("_"))
        assert [prefix for prefix, count in prefixes.items() if count > 2] == [], folder


TRAINER_SIDE = {"trainer", "callbacks", "sinks", "client", "lmms_engine"}


def test_the_server_and_the_trainers_side_do_not_import_each_other() -> None:
    def side(module: str) -> str:
        parts = module.split(".")
        return parts[1] if parts[0] == "evaluate" and len(parts) > 1 else ""

    def across(path: Path) -> set[str]:
        inside = {name.removeprefix("unshard.") for name in imported(tree_of(path))}
        if side(dotted(path)) == "server":
            return {name for name in inside if side(name) in TRAINER_SIDE}
        if side(dotted(path)) in TRAINER_SIDE:
            return {name for name in inside if side(name) == "server"}
        return set()

    assert offences(MODULES, across) == {}


def sibling_imports() -> dict[str, TopologicalSorter[str]]:
    """Return, for each folder, which of its modules and folders import which others in it.

    An import of `a.b.c` in `a.d.e` is one of the folder `a`, from `d` to `b`.
    """
    modules = {f"unshard.{dotted(path)}".removesuffix(".__init__"): path for path in MODULES}
    graphs: dict[str, TopologicalSorter[str]] = {}
    for name, path in modules.items():
        if path.stem == "__main__":
            continue  # a command line, which no module imports
        own = name.split(".")
        for other in imported_modules(tree_of(path), modules):
            pairs = zip(own, other.split("."), strict=False)
            apart = next((at for at, (one, two) in enumerate(pairs) if one != two), None)
            if apart is not None:
                graph = graphs.setdefault(".".join(own[:apart]), TopologicalSorter())
                graph.add(own[apart], other.split(".")[apart])
    return graphs


def imported_modules(tree: ast.Module, modules: Container[str]) -> Iterator[str]:
    """Yield the modules of ours that are imported, also as `from a import module`."""
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    names = {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
    yield from (name for name in (*imported(tree), *names) if name in modules)


def test_the_modules_and_folders_of_a_folder_form_no_circle() -> None:
    circles = {}
    graphs = sibling_imports()
    assert len(graphs) > 30
    for folder, graph in graphs.items():
        try:
            graph.prepare()
        except CycleError as error:
            circles[folder] = " imports ".join(reversed(error.args[1]))
    assert circles == {}


def test_no_module_imports_a_private_name_of_another() -> None:
    def private(path: Path) -> set[str]:
        froms = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom))
        names = {alias.name for one in froms if is_ours(one.module or "") for alias in one.names}
        return {name for name in names if name.startswith("_") and not name.startswith("__")}

    assert offences(MODULES, private) == {}


def test_no_module_gives_a_constant_two_values() -> None:
    """No linter says it, and whoever read the first value gets the second."""

    def twice(path: Path) -> list[str]:
        assigned = [one for one in tree_of(path).body if isinstance(one, ast.Assign)]
        targets = [name for one in assigned for target in one.targets for name in ast.walk(target)]
        names = Counter(name.id for name in targets if isinstance(name, ast.Name))
        return [name for name, count in names.items() if count > 1]

    assert offences(MODULES, twice) == {}


def bases(path: Path) -> dict[str, list[str]]:
    """Return the full names of the bases of each class in a module, by its own full name."""
    tree, places = tree_of(path), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            places |= {alias.asname or alias.name: node.module or "" for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            places[node.name] = f"unshard.{dotted(path)}"
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {
        f"unshard.{dotted(path)}.{one.name}": [
            f"{places.get(name, 'builtins')}.{name}"
            for name in (ast.unparse(base).split("[")[0] for base in one.bases)
        ]
        for one in classes
    }


# A class of one of these kinds may have a base of that kind that is ours.
KINDS = {"typing.Protocol", "typing.TypedDict", "typing_extensions.TypedDict"}
PROMISED = {
    # Users of lmms-engine have subclasses of this one.
    "unshard.merger.fsdp2.CheckpointMerger",
    # Users of lmms-eval's client call its methods on ours, too.
    "unshard.evaluate.client.lmms.LmmsClient",
    # In pydantic's way, their fields are keys of the same JSON or YAML object as those of the heir.
    "unshard.evaluate.jobs.Arguments",
    "unshard.evaluate.server.evaluators.work.Profile",
    "unshard.evaluate.server.evaluators.harness.HarnessKeys",
}


def test_no_class_inherits_from_another_of_ours_but_errors_and_types() -> None:
    known = {name: of for path in MODULES for name, of in bases(path).items()}
    assert "unshard.errors.UsageError" in known

    def may_be_base(name: str) -> bool:
        kind, _, plain = name.rpartition(".")
        is_error = kind == "builtins" and issubclass(getattr(builtins, plain), BaseException)
        return is_error or name in KINDS or any(may_be_base(one) for one in known.get(name, ()))

    heirs = {
        name
        for name, of in known.items()
        for base in of
        if base in known and base not in PROMISED and not may_be_base(base)
    }
    assert heirs == set()


def test_a_function_has_at_most_40_lines() -> None:
    def long(path: Path) -> list[str]:
        return [f.name for f in functions(tree_of(path)) if length(f) > LONGEST_FUNCTION]

    assert offences(BELOW_API, long) == {}


def test_a_command_has_at_most_40_lines_below_its_options() -> None:
    """The signature of a command, or its function, is the table of its options, however many."""
    long = [
        function.name
        for path in COMMANDS
        for function in functions(tree_of(path))
        if length(function) - signature_length(function) > LONGEST_FUNCTION
    ]
    assert long == []


def test_only_the_command_lines_print() -> None:
    def prints(path: Path) -> list[int]:
        names = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name))
        return [node.lineno for node in names if node.id == "print"]

    assert offences(SILENT, prints) == {}


def test_what_converts_and_plans_opens_no_file_and_logs_nothing() -> None:
    pure = [path for path in IN_ROOMS if room_of(dotted(path)) in {"tensors", "plan", "convert"}]
    outside = {"os", "io", "sys", "time", "logging", "unshard.containers.open_files"}
    assert offences(pure, lambda path: set(imported(tree_of(path))) & outside) == {}


def test_no_module_imports_torch_or_transformers() -> None:
    def heavy(path: Path) -> set[str]:
        return {name for name in imported(tree_of(path)) if name.split(".")[0] in HEAVY}

    assert offences(MODULES, heavy).keys() <= ON_DEMAND


def test_a_test_imports_no_other_test() -> None:
    """Code that several tests need is a module next to the folders."""

    def tests_imported(path: Path) -> set[str]:
        names = (name.rpartition(".")[2] for name in imported(tree_of(path)))
        return {name for name in names if name.startswith("test_")}

    tests = sorted(Path(__file__).parent.rglob("*.py"))
    assert len(tests) > 200
    found = {path.name: tests_imported(path) for path in tests}
    assert {name: others for name, others in found.items() if others} == {}


def test_the_rules_see_what_they_look_for() -> None:
    """The parsers above find imports in functions, long functions and their docstrings."""
    source = (
        "def f():\n"
        '    """One.\n\n    Two.\n    """\n'
        "    import torch.nn\n"
        "    from unshard.plan.layout import Layout\n"
        "    from unshard import api\n"
        "    return 1\n"
    )
    tree = ast.parse(source)
    assert set(imported(tree)) == {"torch.nn", "unshard.plan.layout", "unshard.api"}
    assert rooms_imported(tree) == {"plan", "api"}
    assert [(length(f), signature_length(f)) for f in functions(tree)] == [(5, 1)]
