"""Data at an s3:// address, read through pyarrow.fs when it is needed: a folder of images, tar shards, or a table.

Credentials, region and endpoint come from where AWS's own tools find them (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION,
AWS_ENDPOINT_URL, the role of the machine), or from the address: `s3://bucket/photos?region=eu-west-1`. Other stores
that pyarrow.fs knows, such as gs://, would take the same way; they are not offered, because nobody has tried them.

Every process opens connections of its own, so a source can be sent to other processes and to other machines.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from vitkit.data import table, tar
from vitkit.data.base import READERS, Source, Splits, excerpt
from vitkit.data.files import ENDINGS, MAX_BYTES
from vitkit.data.folder import SPLIT_FOLDERS, arranged
from vitkit.data.string_table import StringTable, natural
from vitkit.errors import BadImage, DataError, MissingDependency, Unreachable
from vitkit.types import Array

SCHEME = "s3://"
BUFFER = 2**20  # bytes to read at once when listing a tar file: a request takes as long as this many
Listing = dict[str, int]  # name of each file relative to an address -> its size


def is_remote(place: str) -> bool:
    """Return whether a place is an address such as s3://bucket/folder."""
    return place.startswith(SCHEME)


def join(address: str, name: str) -> str:
    """Return the address of a file in a folder.

    Args:
        address: the folder's address.
        name: the file's name, relative to it; an address stays as it is.
    """
    if is_remote(name):
        return name
    place, mark, options = address.partition("?")
    return f"{place.rstrip('/')}/{name}{mark}{options}"


def find(address: str) -> tuple[Any, str]:
    """Return (file system, path in it) of an address."""
    place, _, options = address.partition("?")
    path = place.removeprefix(SCHEME)
    bucket = path.partition("/")[0]
    if not is_remote(place) or not bucket:
        raise DataError(f"Expected an address such as s3://bucket/folder; got {address!r}.")
    options = "&".join(filter(None, (options, "allow_delayed_open=true")))  # so that a small file is one request
    return _connect(os.getpid(), f"{SCHEME}{bucket}?{options}"), path.rstrip("/")


def _fs() -> Any:
    try:
        from pyarrow import fs
    except ImportError as error:
        raise MissingDependency("s3:// addresses need pyarrow: pip install 'vitkit[data]'.") from error
    return fs


@functools.lru_cache(maxsize=16)
def _connect(process: int, address: str) -> Any:
    """Return the file system of a bucket. A connection does not survive a fork, so each process has its own."""
    try:
        return _fs().FileSystem.from_uri(address)[0]
    except (OSError, ValueError) as error:
        raise DataError(f"Expected an address that can be opened; got {address!r}: {why(error)}.") from error


def why(error: Exception) -> str:
    """Say on one line why a request failed."""
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) < 300 else f"{text[:300]}..."


def read(address: str) -> bytes:
    """Return the bytes of a file."""
    files, path = find(address)
    with files.open_input_stream(path) as file:
        return bytes(file.read())


def write(address: str, data: bytes) -> None:
    """Write a file: it is there as a whole, or not at all."""
    files, path = find(address)
    with files.open_output_stream(path) as file:
        file.write(data)


def listing(address: str) -> Listing:
    """Return all files below an address, except hidden ones, with their sizes.

    Raises:
        DataError: there is nothing, or it cannot be listed.
    """
    fs, (files, path) = _fs(), find(address)
    try:
        found = files.get_file_info(fs.FileSelector(path, recursive=True))
    except FileNotFoundError as error:
        raise DataError(f"Expected images, .tar files or a table at {address}; there is nothing.") from error
    except OSError as error:
        raise DataError(f"Could not list {address}: {why(error)}.") from error
    names = ((one.path.removeprefix(f"{path}/"), one) for one in found if one.type == fs.FileType.File)
    return {name: one.size for name, one in names if not any(part.startswith(".") for part in name.split("/"))}


class RemoteFiles(Source):
    """Images in files at an address.

    Args:
        address: the folder that `names` are relative to.
        names: path of each file.
        labels: see Source.
        class_names: see Source.
    """

    def __init__(
        self, address: str, names: Sequence[str], labels: Sequence[int] | Array, class_names: Sequence[str]
    ) -> None:
        super().__init__(labels, class_names, StringTable(names))
        self.address = address

    def raw(self, i: int) -> bytes:
        """Return the bytes of file `i`."""
        return self._with(i, lambda file: bytes(file.read()))

    def excerpt(self, i: int, whole: bool) -> tuple[int, bytes]:
        """See Source."""
        try:
            return self._with(i, lambda file: (file.size(), excerpt(file, 0, file.size(), whole)))
        except BadImage:
            return -1, b""

    def _with(self, i: int, work: Callable[[Any], Any]) -> Any:
        name = self.names[i]
        with _asking(name):
            files, path = find(join(self.address, name))
            with files.open_input_file(path) as file:
                if file.size() > MAX_BYTES:
                    raise BadImage(
                        f"{name}: expected an image of at most {MAX_BYTES:,} bytes; the file has {file.size():,}."
                    )
                return work(file)


class RemoteShards(tar.Shards):
    """Images in tar files at an address; see `tar.Shards`, whose arguments it takes, with addresses as shards."""

    def raw(self, i: int) -> bytes:
        """Return the bytes of image `i`."""
        return self._with(i, lambda file, start, length: bytes(file.read_at(length, start)))

    def excerpt(self, i: int, whole: bool) -> tuple[int, bytes]:
        """See Source."""
        try:
            return self._with(i, lambda file, start, length: (length, excerpt(file, start, length, whole)))
        except BadImage:
            return -1, b""

    def _with(self, i: int, work: Callable[[Any, int, int], Any]) -> Any:
        shard, start, length = self.where[i].tolist()
        with _asking(self.names[i]):
            files, path = find(str(self.shards[shard]))
            with files.open_input_file(path) as file:
                return work(file, start, length)


class _asking:  # noqa: N801
    """A context in which a request fails: what is not there is a bad image, anything else is not the image's fault."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise BadImage(f"{self.name}: cannot be read (No such file).") from error
        if isinstance(error, OSError):
            raise Unreachable(
                f"{self.name}: could not be fetched ({why(error)}). Run the same command again once the storage "
                f"answers."
            ) from error


def splits(place: str) -> Splits:
    """Return the splits of the data at an address.

    Args:
        place: the address after `s3:`, such as `//bucket/folder`.
    """
    address = f"s3:{place}"
    name = address.partition("?")[0].rpartition("/")[2].lower()
    if name.endswith(".tar"):
        return {"all": partial(read_shards, [address])}
    if name.endswith((".csv", ".parquet")):
        return _table(address, name)
    found = listing(address)
    tars = sorted((name for name in found if name.endswith(".tar")), key=natural)
    if any("/" not in name or name.split("/")[0] in SPLIT_FOLDERS["train"] for name in tars):
        return _tars(address, tars)
    return _folders(address, found)


def _table(address: str, name: str) -> Splits:
    try:
        content = io.BytesIO(read(address))
    except OSError as error:
        raise DataError(f"Expected a table at {address}: {why(error)}.") from error
    place, mark, options = address.partition("?")
    files = partial(RemoteFiles, f"{place.rpartition('/')[0]}{mark}{options}")
    if name.endswith(".csv"):
        return table.of_csv(address, io.TextIOWrapper(content, "utf-8-sig", newline=""), files)
    return table.of_parquet(address, content, files)


def _folders(address: str, found: Listing) -> Splits:
    names = [name for name in found if name.lower().endswith(ENDINGS)]
    top = {name.split("/")[0] for name in names}
    folders = {split: next((w for w in words if w in top), None) for split, words in SPLIT_FOLDERS.items()}
    if folders["train"] is None:
        return {"all": partial(read_folder, address, names)}
    below = {
        split: [name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/")]
        for split, folder in folders.items()
        if folder is not None
    }
    classes = _classes(below["train"])
    return {split: partial(read_folder, join(address, str(folders[split])), below[split], classes) for split in below}


def _classes(names: Sequence[str]) -> list[str]:
    found = {name.split("/")[0] for name in names if "/" in name}
    return sorted((name for name in found if not name.startswith("__")), key=natural)


def read_folder(address: str, names: Sequence[str], class_names: Sequence[str] | None = None) -> RemoteFiles:
    """Return the images <class>/**/<image> of a folder, in the order that a folder on a disk has.

    Args:
        address: the folder of class folders.
        names: all images below it.
        class_names: the classes of the training split (default: the class folders).

    Raises:
        DataError: there are no class folders, or one that is not in `class_names`.
    """
    here = _classes(names)
    if not here:
        raise DataError(f"Expected {address}/<class>/<image>, one folder per class; there are no class folders.")
    of: dict[str, list[str]] = {}
    for name in names:
        of.setdefault(name.split("/")[0], []).append(name)
    return RemoteFiles(address, *arranged(address, here, class_names, lambda name: of[name]))


def read_images(address: str) -> RemoteFiles:
    """List every image below an address, without classes.

    Args:
        address: the folder.
    """
    names = sorted(name for name in listing(address) if name.lower().endswith(ENDINGS))
    return RemoteFiles(address, names, [0] * len(names), ())


def _tars(address: str, names: Sequence[str]) -> Splits:
    found: dict[str, list[str]] = {}
    for split, words in SPLIT_FOLDERS.items():
        of = [name for name in names if name.startswith(words) and name.count("/") < 2]
        if of:
            found[split] = [join(address, name) for name in of]
    if "train" not in found:
        found = {"all": [join(address, name) for name in names if "/" not in name]}
    first = partial(read_shards, found["train"]) if "train" in found else None
    return {split: partial(read_shards, shards, first if split != "train" else None) for split, shards in found.items()}


def read_shards(shards: Sequence[str], training: Callable[[], RemoteShards] | None = None) -> RemoteShards:
    """List the images in tar files; the list is not saved, so every start makes it again.

    Args:
        shards: addresses of the tar files.
        training: opens the training split, which decides the classes.
    """

    def rows(numbered: tuple[int, str]) -> list[tuple[int, int, int, str, str]]:
        number, shard = numbered
        try:
            files, path = find(shard)
            with files.open_input_file(path) as file:
                return tar.members(number, shard, io.BufferedReader(file, BUFFER))
        except OSError as error:
            raise DataError(f"Could not read {shard}: {why(error)}.") from error

    with ThreadPoolExecutor(READERS) as readers:
        listed = [row for some in readers.map(rows, enumerate(shards)) for row in some]
    given = list(_class_names(shards[0])) or (list(training().class_names) if training is not None else [])
    labels, class_names = tar.labelled(listed, given, shards[0])
    where = np.array([row[:3] for row in listed], np.int64).reshape(-1, 3)
    base = [shard.partition("?")[0].rpartition("/")[2] for shard in shards]
    return RemoteShards(list(shards), where, [f"{base[row[0]]}/{row[3]}" for row in listed], labels, class_names)


def _class_names(shard: str) -> Iterator[str]:
    place, mark, options = shard.partition("?")
    folder = place.rpartition("/")[0]
    for name in tar.CLASS_FILES:
        for above in (folder, folder.rpartition("/")[0]):
            try:
                text = read(f"{above}/{name}{mark}{options}").decode("utf-8-sig")
            except (OSError, DataError, UnicodeDecodeError):
                continue
            yield from (line.strip() for line in text.splitlines() if line.strip())
            return
