"""The Hugging Face hub, through its own client: its cache, its revisions, its offline mode."""

from __future__ import annotations

import json
from pathlib import Path

from vitkit.errors import HubError, MissingDependency

SMALL = ("config.json", "preprocessor_config.json")


def fetch(name: str, revision: str | None, candidates: tuple[str, ...]) -> Path:
    """Fetch a checkpoint (or find it in the cache) and return the path of its weights; JSON files lie beside them.

    Args:
        name: `owner/name`.
        revision: branch, tag or commit; the main branch when not given.
        candidates: names of weights, best first.

    Raises:
        HubError: says what to download and where to put it.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise MissingDependency("Hub ids need huggingface_hub: pip install huggingface_hub") from None

    def get(file: str) -> Path | None:
        """The path of one file; None where the repository has none, or it cannot be known here."""
        try:
            # one unreachable file is enough: the client tries again and again for each
            return Path(hf_hub_download(name, file, revision=revision, local_files_only=bool(unreachable)))
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
                f"{name} on the hub has none of {', '.join(candidates)}; choose a repository with weights for PyTorch."
            )
        if weights is None:
            raise HubError(_by_hand(name, revision, "is not in the cache, and the hub cannot be reached"))
        for file in SMALL:
            get(file)
        if weights.name.endswith(".index.json"):
            for shard in sorted(set(json.loads(weights.read_text(encoding="utf-8"))["weight_map"].values())):
                if get(shard) is None:
                    raise HubError(_by_hand(name, revision, f"lacks its part {shard} in the cache"))
        return weights
    except GatedRepoError:
        raise HubError(
            f"{name} is gated: accept its terms on https://huggingface.co/{name}, then run `hf auth login`."
        ) from None
    except RevisionNotFoundError:
        raise HubError(f"{name} has no revision {revision!r}; see https://huggingface.co/{name}/commits.") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise HubError(
            f"There is no repository {name!r} on the hub (or it is private: `hf auth login`), and no file "
            f"or folder of that name here."
        ) from None
    except OfflineModeIsEnabled:
        raise HubError(_by_hand(name, revision, "is not in the cache, and offline mode is on")) from None
    except OSError as error:  # the client's network errors are all of this kind
        raise HubError(_by_hand(name, revision, f"could not be fetched ({type(error).__name__})")) from None


def _by_hand(name: str, revision: str | None, what: str) -> str:
    from huggingface_hub import constants

    pin = f" --revision {revision}" if revision else ""
    return (
        f"{name} {what}. Where there is a network, download config.json, preprocessor_config.json and "
        f"model.safetensors from https://huggingface.co/{name}/tree/{revision or 'main'} into one folder and load "
        f"that folder; or run `hf download {name}{pin}` and copy the result into {constants.HF_HUB_CACHE}."
    )
