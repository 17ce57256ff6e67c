"""Fetching one file over http, resuming what was cut off, and unpacking a zip file safely."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from vitkit.errors import DataError


def fetch(url: str, target: Path, *, advice: str, attempts: int = 3, timeout: float = 30.0) -> str:
    """Download a file, unless it is there.

    What has come so far stays in `target`.part, and the next attempt, now or in another run, asks for the rest only.

    Args:
        url: where it comes from.
        target: where it goes.
        advice: what a user without network should do, one sentence for the error.
        attempts: how often a cut connection is taken up again.
        timeout: seconds without a byte after which the connection counts as cut.

    Returns:
        The file's sha256.

    Raises:
        DataError: it could not be fetched; ends with `advice`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    trouble: Exception | None = None
    for attempt in range(attempts if not target.exists() else 0):
        try:
            _continue(url, part, timeout)
            os.replace(part, target)
            break
        except urllib.error.HTTPError as error:
            error.close()
            part.unlink(missing_ok=True) if error.code == 416 else None  # what we hold is not a start of it
            trouble = error
            if error.code not in (408, 416, 429) and error.code < 500:
                break
        except (OSError, http.client.HTTPException) as error:
            trouble = error
        time.sleep(0.2 * attempt)
    if not target.exists():
        raise DataError(f"{url} could not be fetched ({trouble}). {advice}") from trouble
    with open(target, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _continue(url: str, part: Path, timeout: float) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        resumed = have and answer.status == 206
        length = answer.headers.get("Content-Length")
        with open(part, "ab" if resumed else "wb") as file:
            shutil.copyfileobj(answer, file)
            got = file.tell() - (have if resumed else 0)
    if length is not None and got != int(length):
        raise ConnectionError(f"the connection was cut after {got} of {length} bytes")


def unzip(path: Path, folder: Path) -> None:
    """Unpack a zip file into a folder that appears complete or not at all.

    Args:
        path: the zip file.
        folder: must not exist yet.

    Raises:
        DataError: damaged, or with a member that would land outside the folder.
    """
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                inside = (part / member.filename).resolve()
                link = (member.external_attr >> 16) & 0o170000 == 0o120000
                if not inside.is_relative_to(part.resolve()) or link:
                    raise DataError(
                        f"{path} has a member {member.filename!r} that would land outside its folder; "
                        f"nothing was unpacked."
                    )
            archive.extractall(part)
        os.replace(part, folder)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise DataError(f"{path} could not be unpacked: {error}. Delete it and try again.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
