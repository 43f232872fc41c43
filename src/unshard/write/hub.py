"""Push a model to the Hugging Face Hub: a finished output, or file objects without a local copy.

The files are only read. A push has succeeded when the hub confirms every file of the commit.
"""

import json
import logging
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.errors import OutputError, UnshardError, UsageError
from unshard.progress import Listener, Stage, ignore
from unshard.read.hub_files import RECORD_NAME
from unshard.write.record import is_weight_file

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

_Files = Mapping[str, Path | BufferedIOBase]
"""Files by their names in the repository."""

CARD_NAME = "README.md"
_REASONS = {
    401: "the token is not valid",
    403: "the token may not write there",
    404: "the repository does not exist, or the token has no access",
}


def check_repo(repo: str, *, may_ask: bool, is_option: bool = True) -> None:
    """Check whether an output can be pushed, before any work is done.

    Args:
        repo: "NAME" or "OWNER/NAME".
        may_ask: ask the hub whether the token is valid and may write there; else check only the
            name.
        is_option: the user named the repository with --push-to-hub, which is optional.

    Raises:
        UsageError: the name is invalid.
        OutputError: there is no token, it may not write there, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented

    subject = f"⟦--push-to-hub {repo}⟧" if is_option else repo or "the repository"
    later = "; or leave out ⟦--push-to-hub⟧, and push the output later" if is_option else ""
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
        raise OutputError(f"{subject}: {problem}", hint=f"use a token that can write to it{later}")


def _refusal(owner: Mapping[str, object], repo: str) -> str | None:
    """Return why a token (of `owner`) may not write to a repository, if the hub reports it."""
    role = _fields(_fields(owner, "auth"), "accessToken").get("role")
    if role == "read":
        return "the token may only read"
    orgs = owner.get("orgs")
    accounts = [owner, *orgs] if isinstance(orgs, list) else [owner]
    names = [str(account.get("name")) for account in accounts if isinstance(account, Mapping)]
    namespace = repo.rpartition("/")[0]
    if not namespace or namespace in names or role == "fineGrained":
        return None
    return f"the token belongs to {', '.join(names)}, not to {namespace}"


def push(directory: Path, repo: str, names: Collection[str], *, private: bool, bars: bool) -> str:
    """Upload files of a finished output to a repository; return its URL.

    The repository, and the branch of REPO@BRANCH, are created if they do not exist.

    Other weight and index files in the repository are removed, as with `--overwrite` on disk:
    otherwise transformers might load them. A model card in the directory is uploaded too; if
    neither the directory nor the repository has one, it is generated. An existing public repository
    is refused with `private`.

    Raises:
        OutputError: the upload failed; the output on disk is complete.
    """
    paths = {name: directory / name for name in (*names, CARD_NAME)}
    files = {name: path for name, path in paths.items() if path.is_file()}
    only = "".join(f" --include {shlex.quote(name)}" for name in names)
    name, _, branch = repo.partition("@")
    again = f"`hf upload {name} {shlex.quote(str(directory))} .{only}"
    again += f" --revision {branch}" if branch else ""
    again += " --private`" if private else "`"
    with _pushing(repo, f"the complete output in {directory}", again, bars=bars):
        return _upload(files, repo, private=private)


def push_files(
    files: Mapping[str, BufferedIOBase],
    repo: str,
    *,
    private: bool,
    check: Callable[[], None],
    listener: Listener,
) -> str:
    """Upload files as `push` does, from file objects; return the repository's URL.

    Every file is read twice in blocks, for its checksum and for the upload. Git LFS is used,
    because Xet accepts no file objects.

    Args:
        files: by their names in the repository.
        repo: as for `push`.
        private: as for `push`.
        check: called after the upload; if it raises, the repository does not change.
        listener: gets the stages.

    Raises:
        OutputError: the upload failed.
        UnshardError: reading the files, or `check`, raised it.
    """
    found = "nothing was written on this machine, and the repository's files are as before"
    # huggingface_hub warns that Xet accepts no file objects, which is irrelevant to users.
    logger = logging.getLogger("huggingface_hub._commit_api")
    with _pushing(repo, found, "push it again", bars=False), _at_level(logger, logging.ERROR):
        return _upload(files, repo, private=private, check=check, listener=listener)


@contextmanager
def _pushing(repo: str, found: str, again: str, *, bars: bool) -> Iterator[None]:
    """Turn a failure into an OutputError with the remaining state and the way to retry."""
    try:
        with _progress_bars(shown=bars):
            yield
    except Exception as error:
        for cause in _causes(error):  # a source that cannot be read is not the hub's fault
            if isinstance(cause, UnshardError):
                raise cause from None
        before = error.hint if isinstance(error, _NotPushed) else ""
        raise OutputError(
            f"{repo}: was not pushed to the hub: {_reason(error)}",
            found=error.found or found if isinstance(error, _NotPushed) else found,
            hint=f"{before}{again}",
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


class _NotPushed(Exception):  # noqa: N818 (never leaves this module)
    """The reason, a step before retrying, and the remaining state, if it is not the usual one."""

    def __init__(self, reason: str, hint: str = "", found: str = "") -> None:
        super().__init__(reason)
        self.hint = hint
        self.found = found


def _upload(
    files: _Files,
    repo: str,
    *,
    private: bool,
    check: Callable[[], None] = lambda: None,
    listener: Listener = ignore,
) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    if get_token() is None:
        raise _NotPushed("there is no token", "`hf auth login`, or set HF_TOKEN, then: ")
    api, (name, _, branch) = HfApi(), repo.partition("@")
    revision = branch or None
    url = api.create_repo(name, private=private or None, exist_ok=True)
    repo_id = url.repo_id
    if private and not api.repo_info(repo_id).private:
        raise _NotPushed("the repository exists already and is public", "make it private, then: ")
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    existing = api.list_repo_files(repo_id, revision=revision)
    size = sum(map(_size, files.values()))
    listener(Stage("hashing", size))
    additions = [CommitOperationAdd(name, source) for name, source in files.items()]  # type: ignore[arg-type]  # any BufferedIOBase
    if CARD_NAME not in {*files, *existing}:
        card = _make_card(_read(files[RECORD_NAME]), repo_id)
        additions.append(CommitOperationAdd(CARD_NAME, card.encode()))
    listener(Stage("uploading", size))
    api.preupload_lfs_files(repo_id, additions, revision=revision, free_memory=False)
    check()
    stale = [name for name in existing if is_weight_file(name) and name not in files]
    commit = api.create_commit(
        repo_id,
        [*additions, *map(CommitOperationDelete, stale)],
        commit_message="Upload model merged by unshard",
        revision=revision,
    )
    _confirm(api, repo_id, additions, commit.oid)
    return str(url)


def _size(source: Path | BufferedIOBase) -> int:
    if isinstance(source, Path):
        return source.stat().st_size
    size = source.seek(0, 2)
    source.seek(0)
    return size


def _read(source: Path | BufferedIOBase) -> bytes:
    if isinstance(source, Path):
        return source.read_bytes()
    data = source.read()
    source.seek(0)
    return data


def _confirm(
    api: "HfApi", repo: str, additions: "Collection[CommitOperationAdd]", revision: str
) -> None:
    """Check that a commit has every file as it was sent: size, and sha256 if it is in LFS."""
    names = [addition.path_in_repo for addition in additions]
    infos = {info.path: info for info in api.get_paths_info(repo, names, revision=revision)}
    wrong = []
    for addition in additions:
        info, sent = infos.get(addition.path_in_repo), addition.upload_info
        lfs = getattr(info, "lfs", None)
        is_same_size = getattr(info, "size", None) == sent.size
        if not is_same_size or (lfs is not None and lfs.sha256 != sent.sha256.hex()):
            wrong.append(addition.path_in_repo)
    if wrong:
        raise _NotPushed(
            f"the hub's commit {revision} does not have these files as they were sent: "
            f"{', '.join(wrong)}",
            "does a .gitignore in the repository exclude them? then: ",
            f"a commit without them, in {repo}",
        )


@contextmanager
def _at_level(logger: logging.Logger, level: int) -> Iterator[None]:
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


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
    """Return in one line why the hub refused or was not reached, with the HTTP status, if any."""
    text = " ".join(str(error).split()) or type(error).__name__
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return f"{_REASONS.get(status, 'the hub failed')} (HTTP {status}): {text}"
    return text


def _make_card(record: bytes, repo: str) -> str:
    """Return the card of a repository from the content of `unshard.json`."""
    fields = json.loads(record)
    base = _fields(fields, "options").get("base")
    base_model = base if isinstance(base, str) and "/" in base else None  # else a local name
    return model_card(fields, title=repo.rpartition("/")[2], base_model=base_model)


def model_card(record: Mapping[str, object], *, title: str, base_model: str | None = None) -> str:
    """Return a model card with the origin of the weights.

    Args:
        record: the fields of `unshard.json`.
        title: the title of the page.
        base_model: hub id of the model that was trained, if known.
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
    texts = {
        name: f"{value:,}" if isinstance(value, int) else " ".join(str(value).split())
        for name, value in facts.items()
        if value
    }
    rows = ["| {} | {} |".format(name, text.replace("|", "\\|")) for name, text in texts.items()]
    return "\n".join(
        [
            *("---", "library_name: transformers", *base, "tags:", "- unshard", "---", ""),
            *(f"# {title}", "", "Merged by unshard from a sharded training checkpoint.", ""),
            *("| field | value |", "|---|---|", *rows, ""),
        ]
    )


def _fields(record: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}
