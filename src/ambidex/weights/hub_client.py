"""The Hugging Face hub: what its cache on this machine holds, and how to add to it.

The cache is read without ``huggingface_hub``, so that a cached model needs neither the import nor a
socket. Only :meth:`HubClient.download` talks to the hub, and never with HF_HUB_OFFLINE=1.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ambidex.errors import DownloadError, InvalidModelError, ModelNotFoundError
from ambidex.weights.gguf import SPLIT_NAME
from ambidex.weights.safetensors import read_weight_map

#: ``org/name`` or ``org/name:file``.
HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:]+))?", re.ASCII
)
#: Kept free beyond what a download needs.
SPARE_BYTES = 64 << 20
_TRUE = ("1", "ON", "YES", "TRUE")
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EEXIST)


def is_offline(env: Mapping[str, str] | None = None) -> bool:
    """True where HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids every outgoing socket."""
    env = os.environ if env is None else env
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(env.get(name, "").strip().upper() in _TRUE for name in names)


def hub_cache_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where hub files are kept, by the variables that ``huggingface_hub`` knows."""
    env = os.environ if env is None else env
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(name):
            return Path(env[name]).expanduser()
    if env.get("HF_HOME"):
        return Path(env["HF_HOME"]).expanduser() / "hub"
    base = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def check_free_space(folder: Path, num_bytes: int, variable: str) -> None:
    """Raise :class:`DownloadError` unless ``num_bytes`` and some spare fit where ``folder`` is."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    needed, free = num_bytes + SPARE_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"The download needs {needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB free. "
            f"Make room, or set {variable} to a folder on a larger disk."
        )


def gguf_sets(names: Sequence[str]) -> dict[str, list[str]]:
    """GGUF files by the name of their first part; the parts of a split file belong together."""
    sets: dict[str, list[str]] = {}
    for name in sorted(names):
        if not name.lower().endswith(".gguf") or Path(name).name.lower().startswith("mmproj"):
            continue
        match = SPLIT_NAME.fullmatch(name)
        first = f"{match['stem']}-00001-of-{match['count']}.gguf" if match else name
        sets.setdefault(first, []).append(name)
    return sets


def choose_gguf(names: Sequence[str], wanted: str | None, repo: str) -> list[str]:
    """The GGUF file that ``wanted`` names, exactly or by its quantisation, with all its parts.

    Raises :class:`ModelNotFoundError` that lists the choices where none or several fit.
    """
    sets = gguf_sets(names)
    if wanted is None:
        found = list(sets)
    else:
        found = [first for first in sets if wanted in (first, Path(first).name)]
        # "Q4_K" is not Q4_K_M: first as a whole word, then anywhere in the name.
        word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(wanted)}(?![A-Za-z0-9_])", re.IGNORECASE)
        found = found or [first for first in sets if word.search(Path(first).name)]
        found = found or [first for first in sets if wanted.lower() in first.lower()]
    if len(found) == 1:
        return sets[found[0]]
    listed = ", ".join(Path(first).name for first in (found or list(sets))[:12]) or "none"
    if not found:
        raise ModelNotFoundError(
            f"The hub's '{repo}' has no GGUF file '{wanted}'; it has: {listed}. Give one of "
            f"them as {repo}:FILE."
        )
    fit = f"fit '{wanted}'" if wanted else "are there"
    raise ModelNotFoundError(
        f"The hub's '{repo}': {len(found)} GGUF files {fit}: {listed}. Name one as {repo}:FILE, or "
        f"by its quantisation, as {repo}:Q4_K_M."
    )


def wanted_files(names: Sequence[str], wanted: str | None, repo: str) -> list[str]:
    """Which of a repository's files make one model."""
    top = [name for name in names if "/" not in name]
    small = [name for name in top if name.endswith((".json", ".jinja", ".txt", ".model"))]
    weights = [name for name in top if name.endswith(".safetensors")]
    # Some repositories hold the weights a second time, in their maker's own layout.
    weights = [name for name in weights if name.startswith("model")] or weights
    if wanted is None and "config.json" in names and weights:
        return small + weights
    if wanted is not None or gguf_sets(names):
        return choose_gguf(names, wanted, repo)
    weights = [name for name in top if name.endswith((".bin", ".pt", ".pth"))]
    weights = [name for name in weights if name.startswith("pytorch_model")] or weights
    if "config.json" in names and weights:
        return small + weights
    raise ModelNotFoundError(
        f"The hub's '{repo}' holds no model for this engine: no config.json with safetensors, and "
        f"no GGUF file, among its {len(names)} files. Give another id."
    )


def model_path(snapshot: Path, repo: str, wanted: str | None) -> Path | None:
    """The model in a downloaded snapshot (its folder, or a GGUF file), or None if incomplete."""
    names = [
        path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()
    ]
    if wanted is None and "config.json" in names:
        for index in _INDEXES:
            if index in names:
                needed = set(read_weight_map(snapshot / index).values())
                break
        else:
            single = [name for name in names if name in _SINGLES]
            needed = set(single or [n for n in names if n.endswith(_WEIGHT_SUFFIXES)] or ["?"])
        if needed <= set(names) and any(name in names for name in _TOKENIZERS):
            return snapshot
    try:
        files = choose_gguf(names, wanted, repo)
    except ModelNotFoundError:
        return None
    match = SPLIT_NAME.fullmatch(files[0])
    if match is not None and len(files) != int(match["count"]):
        return None
    return snapshot / files[0]


class HubClient:
    """Reads the hub's cache, and adds to it."""

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        load_library: Callable[[], Any] | None = None,
    ) -> None:
        self._env = os.environ if env is None else env
        self._load_library = load_library or _load_huggingface_hub

    def cache_dir(self) -> Path:
        return hub_cache_dir(self._env)

    def cached(self, repo: str, wanted: str | None, revision: str | None) -> Path | None:
        """A complete model in the cache, or None; opens no socket."""
        folder = self.cache_dir() / ("models--" + repo.replace("/", "--"))
        reference = folder / "refs" / (revision or "main")
        try:
            commit = reference.read_text().strip() if reference.is_file() else revision or ""
            snapshot = folder / "snapshots" / commit
            if not commit or not snapshot.is_dir():
                return None
            return model_path(snapshot, repo, wanted)
        except (OSError, UnicodeDecodeError, InvalidModelError):
            # Half a cache is no cache.
            return None

    def download(
        self, repo: str, wanted: str | None, revision: str | None, progress: Callable[[str], None]
    ) -> Path:
        """Bring a model's files up to date; returns its folder or GGUF file.

        Raises :class:`ModelNotFoundError` (the hub does not have it) or :class:`DownloadError`.
        """
        name = repo if wanted is None else f"{repo}:{wanted}"
        if is_offline(self._env):
            found = self.cached(repo, wanted, revision)
            if found is None:
                raise DownloadError(
                    f"The model '{name}' is not in the cache {self.cache_dir()}, and "
                    "HF_HUB_OFFLINE=1 forbids every download. Unset it once and run: "
                    f"ambidex pull {name}"
                )
            progress(f"{name}: HF_HUB_OFFLINE=1, so the cached files stay as they are")
            return found
        library = self._load_library()
        try:
            info = library.HfApi().model_info(repo, revision=revision, files_metadata=True)
            sizes = {item.rfilename: item.size or 0 for item in info.siblings or ()}
            files = wanted_files(list(sizes), wanted, repo)
            num_bytes = sum(sizes[file] for file in files)
            licence = getattr(info.card_data, "license", None) or "not stated"
            progress(
                f"{name}: {len(files)} files, {num_bytes / 1e9:.2f} GB, from the Hugging Face hub, "
                f"licence {licence}"
            )
            if self.cached(repo, wanted, revision) is None:
                check_free_space(self.cache_dir(), num_bytes, "HF_HOME")
            folder = library.snapshot_download(
                repo,
                revision=revision,
                cache_dir=str(self.cache_dir()),
                allow_patterns=[glob_escape(file) for file in files],
            )
        except (DownloadError, ModelNotFoundError):
            raise
        except Exception as error:
            # The library speaks through several HTTP stacks; each has its own errors.
            raise self._translated(error, name) from error
        found = model_path(Path(folder), repo, wanted)
        if found is None:
            raise DownloadError(
                f"The download of '{name}' into {folder} is incomplete. Try again: "
                f"ambidex pull {name}"
            )
        return found

    def _translated(self, error: Exception, name: str) -> DownloadError | ModelNotFoundError:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if "GatedRepoError" in kinds:
            return DownloadError(
                f"The model '{name}' is gated: accept its licence on the hub and set HF_TOKEN, or "
                "log in with: hf auth login"
            )
        if "RepositoryNotFoundError" in kinds or "HFValidationError" in kinds:
            return ModelNotFoundError(
                f"The hub has no model '{name}', or it is private. Check the id, or set HF_TOKEN."
            )
        if "RevisionNotFoundError" in kinds:
            return ModelNotFoundError(f"The hub's '{name}' has no such revision ({reason}).")
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            return DownloadError(
                f"The hub's cache {self.cache_dir()} cannot be written, so '{name}' was not "
                f"fetched: {error.strerror}. Set HF_HOME to a folder that you can write to."
            )
        return DownloadError(
            f"The model '{name}' is not in the cache {self.cache_dir()} and could not be "
            f"downloaded ({reason}). Check the network; on a machine without one set "
            "HF_HUB_OFFLINE=1 and copy the files into the cache, or give the path of a folder or "
            "GGUF file."
        )


def glob_escape(name: str) -> str:
    """A file name as a pattern that fits itself alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _load_huggingface_hub() -> Any:
    """Import ``huggingface_hub``, telemetry off, and without bars where there is no terminal."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        library = importlib.import_module("huggingface_hub")
        constants = importlib.import_module("huggingface_hub.constants")
        utils = importlib.import_module("huggingface_hub.utils")
    except ImportError as error:
        raise DownloadError(
            f"The package huggingface_hub cannot be imported ({error}). Install it: "
            "pip install huggingface_hub"
        ) from None
    # It may have been imported, with other settings, before.
    vars(constants)["HF_HUB_DISABLE_TELEMETRY"] = True
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    return library
