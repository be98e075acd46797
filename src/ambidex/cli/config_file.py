"""``--config``: a YAML file of options, with line numbers, or a model's folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ambidex.errors import OptionError
from ambidex.options import FileOptions, Option, Resolved, config_path, resolve

_MAX_BYTES = 1 << 20
#: Far more than there are options; reading them takes a second.
_MAX_NODES = 10_000
_PIPE_FOLDERS = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")


def resolve_command(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    command: str = "serve",
    extra: Sequence[Option] = (),
) -> Resolved:
    """``options.resolve``, with the file that ``--config`` names."""
    path = config_path(argv, extra=extra)
    file = None if path is None else load_config(path)
    return resolve(argv, env, file, command=command, extra=extra)


def load_config(name: str) -> FileOptions:
    """The options of a YAML file; or, for a folder with a config.json, the model's configuration.

    Raises :class:`OptionError` that names the file and, where there is one, the line.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _model_folder(path, name)
    try:
        text = _read(path, name)
    except FileNotFoundError:
        raise OptionError(
            f"--config: there is no file {name}. Give a YAML file of options."
        ) from None
    except UnicodeDecodeError as error:
        raise OptionError(f"--config: {name} is not UTF-8 text: {error}.") from None
    except OSError as error:
        raise OptionError(f"--config: {name} cannot be read: {error.strerror}.") from None
    values, lines = _parse(text, name)
    if path.name == "config.json" and ("model_type" in values or "architectures" in values):
        return _model_folder(path.parent, name)
    return FileOptions(name, values, lines)


def _read(path: Path, name: str) -> str:
    """The text of a regular file, or of a pipe that the shell made (``--config <(command)``)."""
    # Opening a FIFO that nobody writes to would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        is_shell_pipe = stat.S_ISFIFO(mode) and str(path).startswith(_PIPE_FOLDERS)
        if not stat.S_ISREG(mode) and not is_shell_pipe:
            raise OptionError(f"--config: {name} is no regular file. Give a YAML file of options.")
        os.set_blocking(descriptor, True)
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise OptionError(
            f"--config: {name} has more than {_MAX_BYTES} bytes, too many for a file of options."
        )
    return raw.decode("utf-8")


def _model_folder(folder: Path, name: str) -> FileOptions:
    if not (folder / "config.json").is_file():
        raise OptionError(
            f"--config: {name} is a folder without a config.json. Give a YAML file of options, "
            "or a model's folder."
        )
    note = f"--config {name} is a model's configuration, not a file of options: used as such."
    is_model = any(child.suffix in _WEIGHTS for child in folder.iterdir())
    return FileOptions(
        name,
        {"hf-config-path": str(folder)},
        notes=(note,),
        fallback_model=str(folder) if is_model else None,
    )


def _parse(text: str, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    # Here, because it takes a tenth of a second.
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.composer import Composer
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.events import AliasEvent

    num_nodes = 0

    class PlainComposer(Composer):
        """Without aliases, of which a few lines make billions of values."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            nonlocal num_nodes
            event = self.parser.peek_event()
            line = event.start_mark.line + 1
            if isinstance(event, AliasEvent) or event.anchor is not None:
                sign = "*" if isinstance(event, AliasEvent) else "&"
                raise OptionError(
                    f"{name}, line {line}: {sign}{event.anchor}: anchors and aliases are not "
                    "supported. Write the value out, and put text that begins so in quotes."
                )
            num_nodes += 1
            if num_nodes > _MAX_NODES:
                raise OptionError(
                    f"{name}, line {line}: more than {_MAX_NODES} values, too many for options."
                )
            return super().compose_node(parent, index)

    yaml = YAML(typ="rt")
    yaml.Composer = PlainComposer
    try:
        data = yaml.load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1
        raise OptionError(
            f"{name}, line {line}: the same option is given twice. Keep one of them."
        ) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = error.problem or error.context or "it is no YAML"
        if "'\\t'" in problem:
            problem = "a tab; YAML is indented with spaces"
        raise OptionError(f"{name}, line {line}: {problem}.") from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise OptionError(f"--config: {name} is no YAML: {str(error).splitlines()[0]}.") from None
    if data is None:
        return {}, {}
    if not isinstance(data, CommentedMap):
        raise OptionError(
            f"{name} must hold one option a line, such as `max-model-len: 8192`; "
            f"it holds a {'list' if isinstance(data, list) else 'single value'}."
        )
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, value in data.items():
        line = data.lc.data[key][0] + 1 if key in data.lc.data else 1
        if not isinstance(key, str):
            raise OptionError(f"{name}, line {line}: {key!r} is no name of an option.")
        values[str(key)] = _plain(value, f"{name}, line {line}: {key}")
        lines[str(key)] = line
    return values, lines


def _plain(value: Any, where: str) -> Any:
    """ruamel's own types, which remember comments and quotes, as plain Python values."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item, where) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, where) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise OptionError(
        f"{where} has a value of a kind that no option takes ({type(value).__name__}). "
        "Put text in quotes."
    )
