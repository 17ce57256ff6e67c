"""Download a file over HTTP, resuming interrupted downloads, and unpack a zip file safely."""

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
    """Download a file unless it already exists.

    A partial download stays in `target`.part; the next attempt, in this run or a later one, requests only the rest.

    Args:
        url: the file to download.
        target: where to save it.
        advice: a sentence that tells a user without a network what to do; ends the error message.
        attempts: number of tries (default: 3).
        timeout: seconds without data after which a connection counts as lost (default: 30).

    Returns:
        The file's SHA-256.

    Raises:
        DataError: the download failed.
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
            part.unlink(missing_ok=True) if error.code == 416 else None  # the part is not the start of this file
            trouble = error
            if error.code not in (408, 416, 429) and error.code < 500:
                break
        except (OSError, http.client.HTTPException) as error:
            trouble = error
        time.sleep(0.2 * attempt)
    if not target.exists():
        raise DataError(f"{url} could not be downloaded ({trouble}). {advice}") from trouble
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
        raise ConnectionError(f"the connection was lost after {got} of {length} bytes")


def unzip(path: Path, folder: Path) -> None:
    """Unpack a zip file into a new folder, completely or not at all.

    Args:
        path: the zip file.
        folder: the folder to create; must not exist yet.

    Raises:
        DataError: the file is damaged, or has a member that would be written outside the folder.
    """
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                inside = (part / member.filename).resolve()
                link = (member.external_attr >> 16) & 0o170000 == 0o120000
                if not inside.is_relative_to(part.resolve()) or link:
                    raise DataError(
                        f"{path} has a member {member.filename!r} that would be written outside its folder; "
                        f"nothing was unpacked."
                    )
            archive.extractall(part)
        os.replace(part, folder)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise DataError(f"{path} could not be unpacked: {error}. Delete it and try again.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
