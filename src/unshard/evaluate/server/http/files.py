"""The files that an evaluator wrote about a job: its results and samples."""

from collections.abc import Iterator
from typing import BinaryIO
from urllib.parse import quote

from fastapi import APIRouter, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from unshard.evaluate.server.http.answers import ErrorBody, Served, find_job
from unshard.evaluate.server.http.page.rendering import HEADERS
from unshard.evaluate.server.queue.job_files import JobFile, list_files, open_file

router = APIRouter(prefix="/api/v1/jobs", tags=["v1"], responses={"4XX": {"model": ErrorBody}})
_PIECE = 1 << 18


class FileList(BaseModel):
    """Files by their paths below the evaluator's output; one that is not kept was too large."""

    files: list[JobFile]


@router.get("/{job_id}/files")
def files(service: Served, job_id: str) -> FileList:
    """List the results and samples that the evaluator wrote about a completed job."""
    return FileList(files=list_files(service.work_dir, find_job(service, job_id)))


_FILE = {"content": {"text/plain": {"schema": {"type": "string", "format": "binary"}}}}


@router.get("/{job_id}/files/{name:path}", response_model=None, responses={200: _FILE})
def file(service: Served, job_id: str, name: str) -> StreamingResponse:
    """Return one of these files as it was written."""
    found = open_file(service.work_dir, find_job(service, job_id), name)
    if found is None:
        raise HTTPException(404, f"job {job_id} has no file of this name")
    kept_as = quote(name.rpartition("/")[2], safe="")
    return StreamingResponse(
        _pieces(found),
        media_type="text/plain; charset=utf-8",
        headers={**HEADERS, "Content-Disposition": f"attachment; filename*=UTF-8''{kept_as}"},
    )


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece
