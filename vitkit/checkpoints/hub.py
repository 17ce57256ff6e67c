"""The Hugging Face hub, through its own client, with its cache, revisions and offline mode."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from vitkit.checkpoints.containers import read_index
from vitkit.errors import HubError, MissingDependency

SMALL = ("config.json", "preprocessor_config.json")
OPEN_CLIP = "open_clip_config.json"  # what open_clip writes instead of config.json
README = "README.md"  # its front matter states the licence


def fetch(name: str, revision: str | None, candidates: tuple[str, ...]) -> Path:
    """Fetch a checkpoint (or find it in the cache) and return the path of its weights; its JSON files are next to them.

    Args:
        name: `owner/name`.
        revision: branch, tag or commit (default: the main branch).
        candidates: names that the weights may have, best first.

    Raises:
        HubError: it could not be fetched; says what to download and where to put it.
    """
    try:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import (  # type: ignore[attr-defined]
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            HTTPError,  # of the library behind the client
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise MissingDependency("Hub ids need huggingface_hub: pip install huggingface_hub") from None

    offline = constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT)

    def get(file: str) -> Path | None:
        """Return the path of one file; None if the repository lacks it, or if that cannot be known offline."""
        try:
            # ask only the cache once the hub is known to be out of reach: the client retries for a long time
            return Path(hf_hub_download(name, file, revision=revision, local_files_only=offline or bool(unreachable)))
        except LocalEntryNotFoundError:  # offline, or no network: it may still exist
            unreachable.append(file)
        except EntryNotFoundError:
            pass
        return None

    unreachable: list[str] = []
    try:
        weights = next((path for file in candidates if (path := get(file)) is not None), None)
        if weights is None and not unreachable:
            raise HubError(
                f"Expected one of {', '.join(candidates)} on the hub; {name} has none. Choose a repository with "
                f"PyTorch weights."
            )
        if weights is None:
            raise HubError(_by_hand(name, revision, "is not in the cache, and the hub cannot be reached"))
        for file in (*SMALL, OPEN_CLIP, README):
            get(file)
        if weights.name.endswith(".index.json"):
            for shard in read_index(weights)[1]:
                if get(shard) is None:
                    raise HubError(_by_hand(name, revision, f"is incomplete in the cache (it lacks {shard})"))
        return weights
    except GatedRepoError:
        raise HubError(
            f"{name} is gated: accept its terms on https://huggingface.co/{name}, then run `hf auth login`."
        ) from None
    except RevisionNotFoundError:
        raise HubError(f"{name} has no revision {revision!r}; see https://huggingface.co/{name}/commits.") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise HubError(
            f"There is no file or folder {name!r}, and no such repository on the hub (or it is private: run "
            f"`hf auth login`)."
        ) from None
    except OfflineModeIsEnabled:
        raise HubError(_by_hand(name, revision, "is not in the cache, and offline mode is on")) from None
    except (OSError, HTTPError) as error:  # of older clients, and of newer ones
        raise HubError(_by_hand(name, revision, f"could not be fetched ({type(error).__name__})")) from None


def reachable(url: str, seconds: float = 1.0) -> bool:
    """Whether a connection to a URL, or to the proxy for it, opens in time."""
    parts = urlsplit(url)
    proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
    host = urlsplit(proxy) if proxy else parts
    address = host.hostname or "", host.port or (443 if host.scheme == "https" else 80)
    opened: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection(address, timeout=seconds).close()
            opened.append(True)

    # in a thread, because looking up a name has no time limit of its own
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(opened)


def _by_hand(name: str, revision: str | None, what: str) -> str:
    from huggingface_hub import constants

    pin = f" --revision {revision}" if revision else ""
    return (
        f"{name} {what}. On a machine with a network, download config.json, preprocessor_config.json and "
        f"model.safetensors from https://huggingface.co/{name}/tree/{revision or 'main'} into one folder and load "
        f"that folder; or run `hf download {name}{pin}` and copy the result into {constants.HF_HUB_CACHE}."
    )


def check_name(name: str) -> None:
    """Raise HubError unless a name is `owner/name`, as the hub takes it.

    Args:
        name: the name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) or ".." in name or len(name) > 96:
        raise HubError(f"Expected owner/name, such as jane/food, as the name on the hub; got {name!r}.")


def upload(folder: str | Path, name: str, *, private: bool = False) -> str:
    """Send a folder to the hub as one commit, creating the repository if needed, and return its address.

    Args:
        folder: the files.
        name: `owner/name`.
        private: whether only you can see a new repository.

    Raises:
        HubError: the hub refused, or cannot be reached.
    """
    from huggingface_hub import HfApi, constants, errors
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE:
        raise HubError("Expected a network to push to the hub; offline mode is on (HF_HUB_OFFLINE). Use --dry-run.")
    api = HfApi()
    try:
        url = str(api.create_repo(name, private=private, exist_ok=True, repo_type="model"))
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model by vitkit")
    except OfflineModeIsEnabled:
        raise HubError("Expected a network to push to the hub; offline mode is on. Use --dry-run.") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        login = " Run `hf auth login` with a token that may write." if status in (401, 403) else ""
        raise HubError(f"The hub refused {name} ({str(error).splitlines()[0]}).{login}") from None
    except (OSError, ValueError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # the client's library's
        raise HubError(f"{name} could not be sent to the hub ({type(error).__name__}: {error}).") from None
    return url
