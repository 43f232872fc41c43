"""Secrets in an evaluator's command and files, which the script of a job must not show.

A value is a secret by the name before it (`--api-key VALUE`, `token=VALUE`, `"password": "VALUE"`)
or by its form (`Bearer VALUE`, `https://user:VALUE@host`, the tokens of well-known services).
Other values must stay exactly as they are: `add_bos_token: false` decides a number.
"""

import re
from collections.abc import Iterator, Sequence

LEFT_OUT = "SECRET_LEFT_OUT"
"""Stands for each secret."""

_NAME = (
    r"(?:[A-Za-z0-9]+[_-])*(?:(?:api|access|secret|private|auth|account|subscription)[_-]?key"
    r"|secret|password|passwd|passphrase|pwd|pass|credentials?|auth|authorization|token)"
)
_OPTION = re.compile(rf"--?{_NAME}", re.IGNORECASE)
# The name begins a line, an argument or an item: a word within a sentence is not a name.
_PAIR = re.compile(
    rf"""(?P<name>(?:^[ \t-]*|[{{,;&?"'][ \t]*|--?){_NAME}["']?[ \t]*[=:][ \t]*)"""
    r"""(?P<value>"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s"',;{}&]+(?=["']?[ \t]*(?:$|[,;}&])))""",
    re.IGNORECASE | re.MULTILINE,
)
# `add_bos_token: false`, `pad_token: <s>`, `eos_token: 2`
_PLAIN = re.compile(r"(?:true|false|null|none||[-+.\d]{1,7}|<.*>|\[.*\])", re.IGNORECASE)
_HEADER = re.compile(r"\b(Bearer|Basic)[ \t]+[\w.~+/=-]{8,}", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[\w-]{12,}|gh[a-z]_[A-Za-z0-9]{20,}|glpat-[\w-]{12,}"
    r"|xox[a-z]-[\w-]{8,}|AKIA[A-Z0-9]{12,}|AIza[\w-]{20,})"
)


def redact(text: str) -> str:
    """Return a text with `LEFT_OUT` in place of each secret."""
    text = _IN_URL.sub(LEFT_OUT, _HEADER.sub(rf"\1 {LEFT_OUT}", text))
    return _KNOWN.sub(LEFT_OUT, _PAIR.sub(_redact_pair, text))


def redact_command(command: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of a command; the one after an option such as `--token` is a value."""
    before = ""
    for argument in command:
        is_secret = _OPTION.fullmatch(before) and not argument.startswith("-")
        yield LEFT_OUT if is_secret and not _PLAIN.fullmatch(argument) else redact(argument)
        before = argument


def _redact_pair(pair: re.Match[str]) -> str:
    value = pair["value"]
    quote = value[0] if value[0] in "\"'" else ""
    is_plain = _PLAIN.fullmatch(value.strip("\"'"))
    return pair[0] if is_plain else f"{pair['name']}{quote}{LEFT_OUT}{quote}"
