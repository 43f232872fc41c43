"""Phrases that CONTRIBUTING.md asks to avoid, counted; the counts may only fall.

A phrase can be right in its place, so these are limits and not bans. Rewrite the sentence: another
word in the same construction improves the figure only.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "unshard").rglob("*.py"))
TREES = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

IGNORE = re.IGNORECASE
BEFORE = r"(?:^|[.:;,(]\s*|\b(?:of|in|from|by|with|to|and|or|than|is|are|be|on|for)\s+)"
PHRASES = {
    "what-clause as a noun": re.compile(
        BEFORE + r"what\s+(?!is the|are the|if\b)\w+", re.IGNORECASE
    ),
    "one that": re.compile(r"\bones?\s+(?:that|which|of|who|whose)\b", IGNORE),
    "nobody, whoever": re.compile(r"\b(?:nobody|whoever|somebody)\b", IGNORE),
    "x, and not y": re.compile(r", and not \w", IGNORE),
    "is no": re.compile(r"\b(?:is|are|was|were) no (?!longer|more)\w", IGNORE),
    "is said, stands": re.compile(
        r"\b(?:(?:is|are) (?:said|told)|stands (?:in|at|for))\b", re.IGNORECASE
    ),
}
LIMITS = {
    "docstrings": [6, 45, 0, 1, 33, 3],
    "strings": [0, 23, 0, 3, 22, 1],
    "documents": [5, 15, 0, 1, 17, 0],
}
"""The most occurrences of each phrase, in the order of `PHRASES`."""

VAGUE = frozenset(
    "one ones found made given known kept left told shown taken what place places stated noted done"
    " asked wanted meant".split()
)
VAGUE_LIMIT, SHARED_CLASSES_LIMIT = 497, 5
SLACK = 10
"""A limit this far above its count has to be lowered, so that what was gained stays."""


def docstrings_of(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the constants that are docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            statement = node.body[0]
            assert isinstance(statement, ast.Expr)
            assert isinstance(statement.value, ast.Constant)
            yield statement.value


def texts_of(kind: str) -> list[str]:
    """Return the docstrings, the other strings with the page's templates, or the documents."""
    if kind == "docstrings":
        return [str(one.value) for tree in TREES for one in docstrings_of(tree)]
    if kind == "documents":
        pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        return [page.read_text(encoding="utf-8") for page in pages]
    templates = (ROOT / "src" / "unshard").rglob("*.html")
    texts = [page.read_text(encoding="utf-8") for page in templates]
    for tree in TREES:
        docstrings = {id(one) for one in docstrings_of(tree)}
        strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
        texts += [
            one.value for one in strings if isinstance(one.value, str) and id(one) not in docstrings
        ]
    return texts


def assert_only_fallen(what: str, count: int, limit: int) -> None:
    """Fail if a count has risen, or if its limit no longer holds it down."""
    assert count <= limit, f"{what}: {count}, at most {limit}: rewrite the sentence"
    assert count + SLACK > limit, f"{what}: {count} now, lower the limit of {limit} to it"


@pytest.mark.parametrize("kind", LIMITS)
def test_a_phrase_is_not_used_more_often(kind: str) -> None:
    texts = texts_of(kind)
    assert sum(map(len, texts)) > 100_000
    for (name, pattern), limit in zip(PHRASES.items(), LIMITS[kind], strict=True):
        assert_only_fallen(f"{name} in {kind}", sum(len(pattern.findall(t)) for t in texts), limit)


def test_a_name_is_not_a_participle_or_a_pronoun_more_often() -> None:
    names: Counter[str] = Counter()
    for tree in TREES:
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                names[node.arg.strip("_")] += 1
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id.strip("_")] += 1
    assert_only_fallen("vague names", sum(names[one] for one in VAGUE), VAGUE_LIMIT)


def test_a_class_name_has_no_further_meaning() -> None:
    files: dict[str, set[Path]] = defaultdict(set)
    for path, tree in zip(SOURCES, TREES, strict=True):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name.strip("_")].add(path)
    shared = sorted(name for name, places in files.items() if len(places) > 1)
    assert_only_fallen(
        f"class names with several meanings, {shared}", len(shared), SHARED_CLASSES_LIMIT
    )
