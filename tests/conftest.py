"""What all tests share: the default model, tiny models, and programs that may be missing."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import hypothesis
import pytest

# Sets how long OpenMP's threads spin, which must happen before anything imports torch.
import ambidex  # noqa: F401


def limit_examples(most: int) -> None:
    """Gives every hypothesis test at most ``most`` examples, those with settings of their own too.

    Sanitizers make tests several times slower (scripts/sanitize.sh sets the variable below).
    """
    plain = hypothesis.settings.__init__

    def limited(self: hypothesis.settings, *parents: Any, **values: Any) -> None:
        if "max_examples" in values:
            values["max_examples"] = min(values["max_examples"], most)
        plain(self, *parents, **values)

    hypothesis.settings.__init__ = limited  # type: ignore[method-assign]
    hypothesis.settings.register_profile("few", max_examples=most, deadline=None)
    hypothesis.settings.load_profile("few")


if "AMBIDEX_TEST_EXAMPLES" in os.environ:
    limit_examples(int(os.environ["AMBIDEX_TEST_EXAMPLES"]))

# Lets the tests of this folder import ``llm_helpers``, which lies beside them.
sys.path.insert(0, str(Path(__file__).parent))

IS_CI = os.environ.get("CI", "").lower() == "true"


def limit_levels(forced: str) -> None:
    """Tests that choose among levels, or compare them, get ``forced`` and the plainest."""
    from ambidex.kernels.cpu.library import load

    library = load()
    supported = library.supported_levels()
    if forced not in supported:
        raise pytest.UsageError(f"AMBIDEX_CPU_LEVEL={forced}: there are {', '.join(supported)}.")
    kept = [level for level in supported if level in (supported[0], forced)]
    library.supported_levels = lambda: list(kept)


if os.environ.get("AMBIDEX_CPU_LEVEL"):
    limit_levels(os.environ["AMBIDEX_CPU_LEVEL"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """AMBIDEX_CPU_LEVEL leaves out tests of native kernels at other levels."""
    forced = os.environ.get("AMBIDEX_CPU_LEVEL")
    if not forced:
        return

    kept, left_out = [], []
    for item in items:
        parameters = getattr(item, "callspec", None)
        level = parameters.params.get("level", forced) if parameters else forced
        (kept if level == forced else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(scope="session")
def need_program() -> Callable[[str], str]:
    """``need_program(name)``: the program's path. Where it is missing the test is skipped, which
    the summary names; under CI=true it fails."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            message = f"the program {name} is not installed"
            if IS_CI:
                pytest.fail(message)
            pytest.skip(message)
        return path

    return find


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


def command_env(env: Mapping[str, str] | None = None, path: Path | None = None) -> dict[str, str]:
    """The environment of a command: one thread, so that tests can run beside each other, and a
    folder that goes before all others on Python's path."""
    paths = [*([str(path)] if path else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        **(env or {}),
    }


@pytest.fixture(scope="session")
def run_command() -> Callable[..., Outcome]:
    """``run_command("run", MODEL, ..., stdin=b"", env={}, path=FOLDER)``: a process of its own."""

    def run(
        *words: str,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        path: Path | None = None,
        module: str = "ambidex",
        **options: Any,
    ) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            input=stdin,
            capture_output=True,
            env=command_env(env, path),
            timeout=120,
            check=False,
            **options,
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture
def call_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Outcome]]:
    """``call_command("run", MODEL, ..., stdin=b"")`` in this process, where PyTorch is loaded."""
    from io import BytesIO, TextIOWrapper

    from ambidex.cli import main

    root, ours = logging.getLogger(), logging.getLogger("ambidex")
    before = (list(root.handlers), root.level, ours.level)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(*words: str, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(stdin), encoding="utf-8"))
        capfd.readouterr()
        code = main(words)
        return Outcome(code, *capfd.readouterr())

    yield call
    root.handlers[:], root.level, ours.level = before


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF, fetched into the cache once."""
    from ambidex.errors import DownloadError
    from ambidex.weights import hub

    try:
        return hub.resolve_model(hub.DEFAULT_MODEL).path
    except DownloadError as error:
        if IS_CI:
            raise
        pytest.skip(str(error))


class TinyModel(Protocol):
    """See :func:`tiny_model`."""

    def __call__(self, kind: str, *, tokenizer: bool = False, **sizes: int) -> Path: ...


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """``tiny_model(kind)``: a folder with a small random model, made once; with a tokenizer of
    its 512 tokens and a chat template, if asked for. ``sizes`` change its configuration."""
    made: dict[tuple[object, ...], Path] = {}

    def make(kind: str, *, tokenizer: bool = False, **sizes: int) -> Path:
        model = (kind, *sorted(sizes.items()))
        if (model, False) not in made:
            made[model, False] = save_tiny(kind, tmp_path_factory.mktemp(kind), sizes)
        if (model, tokenizer) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-text")
            shutil.copytree(made[model, False], folder, dirs_exist_ok=True)
            _save_tiny_tokenizer(folder)
            made[model, True] = folder
        return made[model, tokenizer]

    return make


def save_tiny(kind: str, folder: Path, changes: Mapping[str, int]) -> Path:
    """Writes a random model of an architecture, its configuration changed so; the folder."""
    import torch
    import transformers

    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    special = {
        "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
        "mistral": ("MistralConfig", {"sliding_window": 40}),
        "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
        "gemma3_text": (
            "Gemma3TextConfig",
            {"head_dim": 16, "sliding_window": 32, "num_hidden_layers": 4,
             "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        ),
        "mixtral": ("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
        "qwen3_moe": (
            "Qwen3MoeConfig",
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
             "head_dim": 16, "norm_topk_prob": True},
        ),
    }  # fmt: skip
    name, extra = special[kind]
    torch.manual_seed(7)
    known = {key: value for key, value in changes.items() if key in extra or key in sizes}
    config = getattr(transformers, name)(**{**sizes, **extra, **known})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # Wide enough that the best two logits differ.
                parameter.mul_(4.0)
            elif path.endswith("bias"):
                # They start as zeros, which would hide a mistake.
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def _save_tiny_tokenizer(folder: Path) -> None:
    """Three special tokens, all bytes, and 253 pairs of letters: no text is without tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<pad>", "<s>", "</s>"]
    letters = "etaoinshrdlucmfw"
    pairs = [(left, right) for left in letters for right in letters][: 512 - 256 - len(special)]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
        "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
