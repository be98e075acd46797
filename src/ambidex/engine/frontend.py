"""Text in, text out: what turns a request into tokens for the engine, and its tokens into text.

The server talks to the :class:`Frontend` protocol; :func:`default_frontend` makes the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ambidex.config import EngineConfig
from ambidex.engine.input import InputProcessor, ModelLimits
from ambidex.engine.messages import EngineInfo
from ambidex.engine.output import OutputProcessor, RequestOutput
from ambidex.engine.tokenizer import Tokenizer, TokenizerSource, load_tokenizer
from ambidex.errors import OptionError
from ambidex.request import EngineOutput, EngineRequest, SamplingParams
from ambidex.weights.headers import read_gguf_header


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as it comes from a client, its parameters complete."""

    request_id: str
    #: Text, or token ids.
    prompt: str | Sequence[int]
    params: SamplingParams
    #: ``time.monotonic()``.
    arrival_s: float
    priority: int = 0
    cache_salt: str | None = None
    #: False where a chat template has written them.
    add_special_tokens: bool = True
    #: The client gave max_tokens itself: more than the context holds is then an error.
    is_max_tokens_strict: bool = False


class Frontend(Protocol):
    """``prepare`` and ``apply_chat_template`` run in worker threads, the rest in the event loop."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def notes(self) -> list[str]: ...

    def sampling_params(
        self, values: Mapping[str, Any], default_max_tokens: int | None
    ) -> SamplingParams:
        """Parameters from what a client gave, completed with the model's and OpenAI's defaults.

        Raises :class:`RequestError` for values out of range.
        """

    def prepare(self, submission: Submission) -> list[EngineRequest]:
        """The ``n`` engine requests; raises :class:`RequestError` where it cannot be served."""

    def register(self, submission: Submission, requests: list[EngineRequest]) -> None:
        """From now on, outputs of these engine requests are expected."""

    def process(self, outputs: list[EngineOutput]) -> tuple[list[RequestOutput], list[str]]:
        """What is new for each request, and engine ids whose text met a stop string."""

    def forget(self, request_id: str) -> None:
        """The request has ended; an unknown id is ignored."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The prompt text; see :meth:`Tokenizer.apply_chat_template`."""


FrontendFactory = Callable[[EngineConfig, EngineInfo], Frontend]


class TextFrontend:
    """The :class:`Frontend` of a model: its tokenizer, its limits, its defaults."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        generation_config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._input = InputProcessor(tokenizer, limits, generation_config, seed)
        self._output = OutputProcessor(tokenizer)
        self._chat_template = chat_template
        #: Sentences for the start-up log.
        self.notes = [*tokenizer.notes, *self._input.notes]

    def sampling_params(
        self, values: Mapping[str, Any], default_max_tokens: int | None
    ) -> SamplingParams:
        return self._input.make_params(values, default_max_tokens=default_max_tokens)

    def prepare(self, submission: Submission) -> list[EngineRequest]:
        return self._input.process(
            submission.request_id,
            submission.prompt,
            submission.params,
            submission.priority,
            submission.cache_salt,
            submission.arrival_s,
            add_special_tokens=submission.add_special_tokens,
            strict_max_tokens=submission.is_max_tokens_strict,
        )

    def register(self, submission: Submission, requests: list[EngineRequest]) -> None:
        prompt = submission.prompt if isinstance(submission.prompt, str) else None
        self._output.add_requests(submission.request_id, prompt, requests)

    def process(self, outputs: list[EngineOutput]) -> tuple[list[RequestOutput], list[str]]:
        return self._output.process(outputs)

    def forget(self, request_id: str) -> None:
        self._output.abort(request_id)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        return self.tokenizer.apply_chat_template(
            messages, **{"chat_template": self._chat_template, **options}
        )


def read_chat_template(value: str | None) -> str | None:
    """``--chat-template``: a file, or the template itself.

    Raises :class:`OptionError` for a file that cannot be read.
    """
    if value is None or "{" in value or "\n" in value:
        return value
    path = Path(value)
    if path.exists() and not path.is_file():
        # A pipe would block, and a device has no end.
        raise OptionError(f"--chat-template {value} is no regular file. Give a file on a disk.")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--chat-template {value} cannot be read ({error}). Give a file, or the text itself."
        ) from None


def default_frontend(config: EngineConfig, info: EngineInfo) -> Frontend:
    """The front end of the loaded model."""
    chat_template = read_chat_template(config.model.chat_template)
    path = Path(info.tokenizer_path)
    is_folder = path.is_dir()
    source = TokenizerSource(
        folder=path if is_folder else None,
        gguf_metadata=None if is_folder else read_gguf_header(path).metadata,
        config=info.model_config,
        generation_config=info.generation_config,
        name=info.model,
    )
    uses_defaults = config.model.generation_config != "vllm"
    return TextFrontend(
        load_tokenizer(source, chat_template),
        ModelLimits(info.max_model_len, info.vocab_size, config.model.max_logprobs),
        info.generation_config if uses_defaults else {},
        config.model.seed,
        chat_template,
    )
