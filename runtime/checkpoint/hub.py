"""The hub through huggingface_hub: one resolved commit, headers by ranged reads, weights only when they fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deepinfer.dsl.params import StoredTensor
from deepinfer.errors import ArtifactError
from deepinfer.runtime.checkpoint.headers import INDEX, SINGLE, read_headers
from deepinfer.runtime.checkpoint.room import require_disk

R = TypeVar("R")
_TEXTS = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = "*.safetensors"


@dataclass(frozen=True)
class Repository:
    """A hub repository at one commit, which the revision ``asked`` for means (None: its main branch). ``files``: bytes
    of each; ``offline``: what the local cache holds of it."""

    name: str
    asked: str | None
    commit: str
    files: Mapping[str, int]
    offline: bool


def resolve(name: str, revision: str | None) -> Repository:
    """The commit that a branch, tag or commit means now. Offline: what the cache holds of it."""
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        folder = _asked(name, revision, lambda: snapshot_download(
            name, revision=revision, local_files_only=True, allow_patterns=_TEXTS))
        files = {p.name: p.stat().st_size for p in sorted(Path(folder).iterdir())}
        return Repository(name, revision, Path(folder).name, files, offline=True)
    info = _asked(name, revision, lambda: HfApi().model_info(name, revision=revision, files_metadata=True))
    files = {f.rfilename: f.size or 0 for f in info.siblings or ()}
    return Repository(name, revision, str(info.sha), files, offline=False)


def fetch_texts(repo: Repository) -> Path:
    """Local folder with config, tokenizer and index."""
    return _download(repo, _TEXTS)


def fetch_headers(repo: Repository, folder: Path) -> Mapping[str, StoredTensor]:
    """Headers of all shards; of a remote repository by ranged reads of some hundred kilobytes a shard."""
    from huggingface_hub import HfApi

    if not {SINGLE, INDEX} & set(repo.files):
        return {}
    if repo.offline:
        return read_headers(folder) if _complete(folder) else {}
    found = _asked(repo.name, repo.commit, lambda: HfApi().get_safetensors_metadata(repo.name, revision=repo.commit))
    return {name: StoredTensor(str(t.dtype), tuple(t.shape))
            for file in found.files_metadata.values() for name, t in file.tensors.items()}


def fetch_weights(repo: Repository, commit: str) -> Path:
    """Local folder with all shards of ``commit``. Their size is compared with the free disk first."""
    from huggingface_hub import constants, try_to_load_from_cache

    if repo.commit != commit:
        raise _moved(repo, commit)
    absent = [size for file, size in repo.files.items() if file.endswith(_WEIGHTS[1:])
              and not isinstance(try_to_load_from_cache(repo.name, file, revision=repo.commit), str)]
    require_disk(repo.name, sum(absent), Path(constants.HF_HUB_CACHE))
    folder = _download(repo, [*_TEXTS, _WEIGHTS])
    if not _complete(folder):
        raise ArtifactError("the repository has no safetensors weights that are here", where=repo.name,
                            allowed=f"{SINGLE}, or {INDEX} with its shards",
                            next_step="unset HF_HUB_OFFLINE, or fetch the whole checkpoint" if repo.offline else
                            "name a checkpoint with safetensors weights")
    return folder


def _complete(folder: Path) -> bool:
    return (folder / SINGLE).is_file() or ((folder / INDEX).is_file() and any(folder.glob(_WEIGHTS)))


def _download(repo: Repository, patterns: list[str]) -> Path:
    """The branch is asked for by its name, so that the cache knows offline what the name meant."""
    from huggingface_hub import snapshot_download

    folder = Path(_asked(repo.name, repo.asked, lambda: snapshot_download(
        repo.name, revision=repo.asked, allow_patterns=patterns, local_files_only=repo.offline)))
    if folder.name != repo.commit:
        raise _moved(repo, folder.name)
    return folder


def _moved(repo: Repository, other: str) -> ArtifactError:
    return ArtifactError("the repository changed while it was read", where=repo.name,
                         found=f"commits {repo.commit} and {other}",
                         next_step="try again, or name a commit with --revision")


def _asked(name: str, revision: str | None, ask: Callable[[], R]) -> R:
    """The hub's answer; each way of failing becomes one sentence with its next step."""
    from huggingface_hub import errors

    transport: type[Exception] = getattr(errors, "HTTPError", OSError)  # of the HTTP library that the hub's uses
    asked = f"{name}@{revision}" if revision else name
    try:
        return ask()
    except errors.GatedRepoError:
        raise ArtifactError("the repository asks for access that this token does not have", where=asked,
                            next_step="accept its terms on the hub and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise ArtifactError("the repository has no such revision", where=name, found=revision,
                            next_step="name a branch, a tag or a commit of it") from None
    except errors.RepositoryNotFoundError:
        raise ArtifactError("the hub has no such repository, or this token may not see it", where=asked,
                            next_step="check the name, or set HF_TOKEN") from None
    except errors.LocalEntryNotFoundError:
        raise ArtifactError("the checkpoint is not in the local cache and the hub is not reached", where=asked,
                            next_step="go online without HF_HUB_OFFLINE, or give a local folder") from None
    except errors.SafetensorsParsingError as error:
        raise ArtifactError(f"a header on the hub cannot be read: {error}", where=asked) from None
    except (errors.HfHubHTTPError, OSError, transport) as error:
        raise ArtifactError("the hub does not answer", where=asked, found=_first_line(error),
                            next_step="check the network, HF_ENDPOINT and HF_TOKEN, or give a local folder") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
