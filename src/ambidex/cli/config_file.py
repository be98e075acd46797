"""``--config``: a YAML file of options, with line numbers, or a model's folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ambidex.errors import OptionError
from ambidex.options import FileOptions, Option, Resolved, config_path, resolve
from ambidex.options_file import SECTIONS, FileItem

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
    path = config_path(argv, command=command, extra=extra)
    file = None if path is None else load_config(path)
    return resolve(argv, env, file, command=command, extra=extra)


def load_config(name: str) -> FileOptions:
    """The options of a YAML file; or, for a folder with a config.json, the model's configuration.

    Raises :class:`OptionError` that names the file and, where there is one, the line.
    """
    if not name.strip():
        raise OptionError("--config is empty. Give a YAML file of options, or leave it out.")
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return _model_folder(path, name)
        text = _read(path, name)
    except FileNotFoundError:
        raise OptionError(
            f"--config: there is no file {name}. Give a YAML file of options."
        ) from None
    except UnicodeDecodeError as error:
        raise OptionError(f"--config: {name} is not UTF-8 text: {error}.") from None
    except OSError as error:
        raise OptionError(f"--config: {name} cannot be read: {error.strerror}.") from None
    items = _parse(text, name)
    is_model = any(item.key in ("model_type", "architectures") for item in items)
    if path.name == "config.json" and is_model:
        return _model_folder(path.parent, name)
    return FileOptions(name, items)


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
    try:
        has_config = (folder / "config.json").is_file()
        is_model = any(child.suffix in _WEIGHTS for child in folder.iterdir())
    except OSError as error:
        raise OptionError(
            f"--config: the folder of {name} cannot be listed: {error.strerror}. Give a YAML file "
            "of options, or make the folder readable."
        ) from None
    if not has_config:
        raise OptionError(
            f"--config: {name} is a folder without a config.json. Give a YAML file of options, "
            "or a model's folder."
        )
    note = f"--config {name} is a model's configuration, not a file of options: used as such."
    return FileOptions(
        name,
        (FileItem("hf-config-path", str(folder)),),
        notes=(note,),
        fallback_model=str(folder) if is_model else None,
    )


def _parse(text: str, name: str) -> tuple[FileItem, ...]:
    """The keys of the file with their lines, those that stand twice too."""
    # Here, because it takes a tenth of a second.
    from ruamel.yaml import YAML
    from ruamel.yaml.composer import Composer
    from ruamel.yaml.constructor import ConstructorError, DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.events import AliasEvent
    from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

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

    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = PlainComposer

    def items(mapping: MappingNode) -> Iterator[FileItem]:
        for key, value in mapping.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode) or not str(key.tag).endswith((":str", ":merge")):
                word = key.value if isinstance(key, ScalarNode) else "a list or a mapping"
                raise OptionError(
                    f"{name}, line {line}: the name of an option belongs before the colon, not "
                    f"{word or 'nothing'}."
                )
            is_mapping = isinstance(value, MappingNode)
            if is_mapping and key.value.replace("-", "_") in SECTIONS:
                yield FileItem(key.value, {}, line, tuple(items(value)))
            else:
                where = f"{name}, line {line}: {key.value}"
                try:
                    found = yaml.constructor.construct_object(value, deep=True)
                except ConstructorError as error:
                    raise OptionError(f"{where}: {error.problem}. Put text in quotes.") from None
                except ValueError as error:
                    problem = str(error)
                    if "digits" in problem:
                        problem = "a number of more than 4300 digits is too large for any option"
                    raise OptionError(f"{where}: {problem}. Put text in quotes.") from None
                found = _plain(found, where)
                yield FileItem(key.value, found, line, () if is_mapping else None)

    try:
        node = yaml.compose(text)
        if node is None or str(node.tag).endswith(":null"):
            return ()
        if not isinstance(node, MappingNode):
            raise OptionError(
                f"{name} must hold one option a line, such as `max-model-len: 8192`; "
                f"it holds a {'list' if isinstance(node, SequenceNode) else 'single value'}."
            )
        return tuple(items(node))
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1
        raise OptionError(
            f"{name}, line {line}: the same key is given twice. Keep one of them."
        ) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = error.problem or error.context or "it is no YAML"
        if "'\\t'" in problem:
            before = text.split("\n")[line - 1].partition("\t")[0]
            problem = "a tab before a value; write a space there"
            if not before.strip():
                problem = "a tab; YAML is indented with spaces"
        raise OptionError(f"{name}, line {line}: {problem}.") from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise OptionError(f"--config: {name} is no YAML: {str(error).splitlines()[0]}.") from None


def _plain(value: Any, where: str) -> Any:
    """Values that options may have: no dates, sets or bytes."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item, where) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, where) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise OptionError(
        f"{where} has a value of a kind that no option takes ({type(value).__name__}). "
        "Put text in quotes."
    )
