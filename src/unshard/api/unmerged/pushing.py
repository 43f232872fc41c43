"""`push`: upload a merged model to the hub, without writing it to disk."""

from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Unpack

from unshard.api.completing import Made, make_report
from unshard.api.making import compare_with_base, late_notes
from unshard.api.options import MergeOptions, accepting
from unshard.api.unmerged.virtual import open_files, plan_files
from unshard.engines.files import PlannedFile
from unshard.keywords import PushKeywords
from unshard.progress import Advanced, Event, Listener, warn
from unshard.showing import hearing
from unshard.stores.nodes.connection import disconnecting
from unshard.write.hub import check_repo, push_files
from unshard.write.report import Report


@accepting(PushKeywords)
@disconnecting()
def push(
    checkpoint: str | Path,
    repo: str,
    *,
    private: bool = False,
    listener: Listener | None = None,
    **options: Unpack[PushKeywords],
) -> Report:
    """Upload the output of `merge` to the hub, straight from the checkpoint.

    Nothing is written on this machine, except that compressed items are decompressed into a
    temporary directory. The repository gets the files of a merge without training state, and a
    model card if it has none, in one commit that removes its other weights. Every file is read
    twice, for its checksum and for the upload, in about 150 MB of memory. If a file of the
    checkpoint changes before the end of the upload, nothing is committed.

    Args:
        checkpoint: as for `merge`.
        repo: "NAME" or "OWNER/NAME"; created if it does not exist.
        private: create it as private; a public repository is refused.
        listener: as for `merge`.
        options: as for `merge`.

    Returns:
        The report of a merge with an empty `output`; `url` is that of the repository.

    Raises:
        OutputError: the hub was not reached, refused, or did not confirm every file.
        UnshardError: as `merge` raises it before it writes; or a file of the checkpoint changed.
    """
    chosen = MergeOptions(**options, extra_state=False)
    check_repo(repo, may_ask=True, is_option=False)
    with hearing(listener) as heard, ExitStack() as stack:
        lock = Lock()

        def hear(event: Event) -> None:
            with lock:  # several threads upload files
                heard(event)

        prepared = plan_files(checkpoint, chosen, hear, stack)
        with open_files(prepared, chosen, stack) as files:
            changed = compare_with_base(prepared, hear)
            notes = warn(hear, late_notes(prepared, changed, {}))
            reported = {name: _reported(file, hear) for name, file in files.items()}
            check = files.check_sources
            url = push_files(reported, repo, private=private, check=check, listener=hear)
            overflows = files.overflows
        notes += warn(hear, late_notes(prepared, None, overflows))
    made = Made(prepared, tuple(notes), changed)
    return make_report(made, None, memory_bytes=chosen.resources.memory_bytes, url=url)


def _reported(file: PlannedFile, listener: Listener) -> PlannedFile:
    """Return the same file, whose reads are reported to the listener."""

    def read(at: int, out: memoryview) -> None:
        file.read_at(at, out)
        listener(Advanced(len(out)))

    return PlannedFile(file.name, file.size, read)
