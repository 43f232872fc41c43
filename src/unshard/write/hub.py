"""Push a finished output to the Hugging Face Hub. The output itself is only read.

Knows repositories and their files. Everything that can fail here fails after the output is safe on
disk, and the error reports that.
"""

import glob
import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.errors import OutputError, UsageError
from unshard.read.hub_files import RECORD_NAME
from unshard.write.record import is_weight_file

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["CARD_NAME", "check_repo", "model_card", "push"]

CARD_NAME = "README.md"
_REASONS = {
    401: "the token is not valid",
    403: "the token may not write there",
    404: "there is no such repository, or the token may not see it",
}


def check_repo(repo: str, *, may_ask: bool) -> None:
    """Check before anything is done whether an output can be pushed.

    Args:
        repo: "NAME" or "OWNER/NAME".
        may_ask: ask the hub whether it accepts the token, and whether that may write there; else
            only the name is checked.

    Raises:
        UsageError: no repository can have this name.
        OutputError: there is no token, it may not write there, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented

    subject = f"--push-to-hub {repo}"
    later = "; or leave --push-to-hub out, and push the output later"
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UsageError(f"{subject}: {error}", expected="NAME or OWNER/NAME") from error
    if not may_ask:
        return
    if get_token() is None:
        raise OutputError(
            f"{subject}: there is no token", hint=f"`hf auth login`, or set HF_TOKEN{later}"
        )
    try:
        owner = HfApi().whoami()
    except Exception as error:
        raise OutputError(
            f"{subject}: {_reason(error)}",
            found="nothing has been read or written yet",
            hint=f"check the token (`hf auth whoami`) and the network{later}",
        ) from error
    problem = _refusal(owner, repo)
    if problem is not None:
        raise OutputError(f"{subject}: {problem}", hint=f"give a token that may write there{later}")


def _refusal(owner: Mapping[str, object], repo: str) -> str | None:
    """Return why the owner of a token may not write to a repository, if the hub reports it."""
    role = _fields(_fields(owner, "auth"), "accessToken").get("role")
    if role == "read":
        return "the token may only read"
    listed = owner.get("orgs")
    orgs = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    names = [str(one.get("name")) for one in (owner, *orgs)]
    namespace = repo.rpartition("/")[0]
    if not namespace or namespace in names or role == "fineGrained":
        return None
    return f"{namespace} is not among the names that the token belongs to: {', '.join(names)}"


def push(directory: Path, repo: str, names: Collection[str], *, private: bool, bars: bool) -> str:
    """Upload files of a finished output to a repository, which is made if need be; return its URL.

    Other weight and index files in the repository are removed, as `--overwrite` does on disk:
    otherwise transformers might load the old ones. A model card in the directory goes along;
    where neither it nor the repository has one, one is made. An existing public repository is
    refused if it should be private.

    Raises:
        OutputError: the upload failed; the output on disk is complete all the same.
    """
    from huggingface_hub import HfApi

    try:
        with _progress_bars(shown=bars):
            return _upload(HfApi(), directory, repo, names, private=private)
    except Exception as error:
        only = "".join(f" --include {shlex.quote(name)}" for name in names)
        again = f"`hf upload {repo} {shlex.quote(str(directory))} .{only}"
        again += " --private`" if private else "`"
        before = error.hint if isinstance(error, _NotPushed) else ""
        raise OutputError(
            f"{repo}: was not pushed to the hub: {_reason(error)}",
            found=f"the output itself, complete, in {directory}",
            hint=f"{before}{again}",
        ) from error


class _NotPushed(Exception):  # noqa: N818 (never leaves this module)
    """Why nothing was pushed, and what to do before trying again."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


def _upload(
    api: "HfApi", directory: Path, repo: str, names: Collection[str], *, private: bool
) -> str:
    from huggingface_hub import get_token

    if get_token() is None:
        raise _NotPushed("there is no token", "`hf auth login`, or set HF_TOKEN, then: ")
    made = api.create_repo(repo, private=private or None, exist_ok=True)
    place = made.repo_id
    if private and not api.repo_info(place).private:
        raise _NotPushed("the repository exists already and is public", "make it private, then: ")
    there = api.list_repo_files(place)
    own_card = (directory / CARD_NAME).is_file()
    names = {*names, CARD_NAME} if own_card else names
    stale = [name for name in there if is_weight_file(name) and name not in names]
    api.upload_folder(
        repo_id=place,
        folder_path=directory,
        commit_message="Upload model merged by unshard",
        allow_patterns=[glob.escape(name) for name in names],
        delete_patterns=[glob.escape(name) for name in stale] or None,
    )
    if not own_card and CARD_NAME not in there:
        record = json.loads((directory / RECORD_NAME).read_bytes())
        base = _fields(record, "options").get("base")
        known = base if isinstance(base, str) and "/" in base else None  # else a directory's name
        card = model_card(record, title=place.rpartition("/")[2], base_model=known)
        api.upload_file(
            path_or_fileobj=card.encode(),
            path_in_repo=CARD_NAME,
            repo_id=place,
            commit_message="Add model card",
        )
    return str(made)


@contextmanager
def _progress_bars(*, shown: bool) -> Iterator[None]:
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented there
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    hide = not shown and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()


def _reason(error: BaseException) -> str:
    """Return in one line why the hub refused or was not reached; a cause may have the status."""
    text = " ".join(str(error).split()) or type(error).__name__
    at: BaseException | None = error
    while at is not None:
        status = getattr(getattr(at, "response", None), "status_code", None)
        if status is not None:
            return f"{_REASONS.get(status, 'the hub failed')} (HTTP {status}): {text}"
        at = at.__cause__
    return text


def model_card(record: Mapping[str, object], *, title: str, base_model: str | None = None) -> str:
    """Return a model card that lists what the weights were made from.

    Args:
        record: the fields of `unshard.json`.
        title: of the page.
        base_model: hub id of the model that was trained, where it is known.
    """
    source, options, output = (_fields(record, key) for key in ("source", "options", "output"))
    facts = {
        "checkpoint": source.get("name"),
        "format": source.get("format"),
        "written by": source.get("writer"),
        "step": "" if source.get("step") is None else str(source["step"]),
        "ranks": source.get("world_size"),
        "weights": " ".join(str(source[key]) for key in ("role", "weights") if source.get(key)),
        "dtype": options.get("dtype"),
        "tensors": output.get("tensors"),
        "parameters": output.get("parameters"),
        "unshard": record.get("unshard"),
    }
    base = [] if base_model is None else [f"base_model: {json.dumps(base_model)}"]
    rows = (f"| {name} | {_cell(value)} |" for name, value in facts.items() if value)
    return "\n".join(
        [
            *("---", "library_name: transformers", *base, "tags:", "- unshard", "---", ""),
            *(f"# {title}", "", "Merged by unshard from a sharded training checkpoint.", ""),
            *("| what | value |", "|---|---|", *rows, ""),
        ]
    )


def _fields(record: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _cell(value: object) -> str:
    """Return a value as one cell of a Markdown table."""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
