"""One model's files behind one interface: configuration, tensors by name, tokenizer files.

Opening reads headers only and needs no torch; ``load`` gives one tensor at a time.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ambidex.config import CheckpointConfig
from ambidex.errors import InvalidModelError, ModelNotFoundError, UnsupportedModelError
from ambidex.weights.gguf import GGUFSource, Unpack, split_parts
from ambidex.weights.headers import GGUFHeader, parse_json_object, require_regular
from ambidex.weights.quantized_source import METHODS, QuantizedSource
from ambidex.weights.safetensors import SafetensorsSource, shards_of

if TYPE_CHECKING:
    import torch

    from ambidex.kernels.quantized import Quantized
    from ambidex.quant.forms import Form

_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
#: What a tokenizer may be made of.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class TensorSource(Protocol):
    """What a file format has to offer."""

    files: list[Path]
    num_bytes: int
    num_parameters: int
    dtype_name: str
    #: awq | bitsandbytes | gguf | gptq, or None for plain numbers.
    quantization: str | None

    def names(self) -> list[str]: ...
    def release_pages(self) -> None: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def load(self, name: str) -> torch.Tensor: ...
    def quantized_form(self, name: str) -> Form | None: ...
    def load_quantized(
        self, name: str, unpack: Unpack | None = None
    ) -> Quantized | torch.Tensor: ...


class Checkpoint:
    """A model's files, opened. Tensor names are those of a Hugging Face checkpoint."""

    def __init__(
        self,
        path: Path,
        format: str,
        source: TensorSource,
        config: CheckpointConfig,
        generation_config: dict[str, Any],
        tokenizer_files: dict[str, Path],
        gguf: GGUFHeader | None = None,
    ) -> None:
        self.path = path
        #: safetensors | gguf | torch
        self.format = format
        self.config = config
        self.generation_config = generation_config
        #: Those of :data:`TOKENIZER_FILES` that lie beside the weights, by name.
        self.tokenizer_files = tokenizer_files
        #: The GGUF header with the tokenizer's metadata; None for the other formats.
        self.gguf = gguf
        self._source = source
        self._names = frozenset(source.names())

    @property
    def files(self) -> list[Path]:
        """The files that hold the weights."""
        return self._source.files

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, as the files hold them."""
        return self._source.num_bytes

    @property
    def num_parameters(self) -> int:
        return self._source.num_parameters

    @property
    def dtype_name(self) -> str:
        """The type that most bytes have: "bfloat16", "float32", "Q4_1" ..."""
        return self._source.dtype_name

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def release_pages(self) -> None:
        """Let go of what the mapped files take of memory."""
        self._source.release_pages()

    def tensor_names(self) -> list[str]:
        return self._source.names()

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor; raises :class:`InvalidModelError` where there is none."""
        self._require(name)
        return self._source.shape(name)

    def load(self, name: str) -> torch.Tensor:
        """One tensor: the file's dtype, or float32 for GGUF. It may lie in the mapped file.

        Raises :class:`InvalidModelError` where there is none of this name.
        """
        self._require(name)
        return self._source.load(name)

    def row_reader(self, name: str) -> Callable[[int, int], torch.Tensor] | None:
        """``read(a, b)`` gives rows ``a`` to ``b`` of what :meth:`load` gives, where that is
        unpacked; None: it is not, or is no matrix."""
        self._require(name)
        return self._source.row_reader(name) if isinstance(self._source, GGUFSource) else None

    @property
    def quantization(self) -> str | None:
        """How the files are quantised: awq, bitsandbytes, gguf or gptq; None for plain numbers."""
        return self._source.quantization

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor is held in a low-bit form."""
        return any(self._source.quantized_form(name) is not None for name in self._names)

    def quantized_form(self, name: str) -> Form | None:
        """The low-bit form of one tensor, from headers alone; None for plain numbers.

        Raises :class:`InvalidModelError` where there is none of this name.
        """
        self._require(name)
        return self._source.quantized_form(name)

    def quantized_bytes(self, name: str) -> int | None:
        """Bytes of :meth:`load_quantized`'s matrix in the native layout; None for plain numbers."""
        form = self.quantized_form(name)
        if form is None:
            return None
        rows, columns = self._source.shape(name)
        return form.num_bytes(rows, columns)

    def fixed_bytes(self, name: str) -> int:
        """Of these bytes, what every part of the matrix has."""
        form = self.quantized_form(name)
        return 0 if form is None else form.fixed_bytes(self._source.shape(name)[1])

    def load_quantized(self, name: str, unpack: Unpack | None = None) -> Quantized | torch.Tensor:
        """One tensor as the file holds it: a low-bit matrix where it has such a form, else plain.

        ``unpack`` (``kernels.cpu.unpack.UnpackOps.unpack_gguf``) makes GGUF's matrices faster.
        Raises :class:`InvalidModelError` where there is none of this name.
        """
        self._require(name)
        return self._source.load_quantized(name, unpack)

    def _require(self, name: str) -> None:
        if name not in self._names:
            raise InvalidModelError(
                f"{self.path} has no tensor '{name}' among its {len(self._names)}. The files do "
                "not fit the configuration; download the model again."
            )

    def __repr__(self) -> str:
        return f"Checkpoint({self.path}, {self.format}, {self.dtype_name})"


def open_checkpoint(path: Path | str, hf_overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a folder with ``config.json`` and weights, or a weight file.

    ``hf_overrides`` is merged into the configuration, level by level. Raises
    :class:`ModelNotFoundError`, :class:`InvalidModelError` or :class:`UnsupportedModelError`.
    """
    path = Path(path)
    try:
        return _open(path, dict(hf_overrides or {}))
    except PermissionError as error:
        raise InvalidModelError(
            f"{error.filename or path} cannot be read: {error.strerror or error}. Check its "
            "permissions, and those of the folders that it lies in."
        ) from None


def _open(path: Path, overrides: dict[str, Any]) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path, overrides)
    if not path.exists():
        raise ModelNotFoundError(f"There is no file or folder {path}. Check the path.")
    require_regular(path)
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return _open_gguf(path, overrides)
    if suffix == ".safetensors":
        return _open_hf(path, "safetensors", SafetensorsSource([path]), path.parent, overrides)
    if suffix in _TORCH_SUFFIXES:
        return _open_hf(path, "torch", TorchSource([path]), path.parent, overrides)
    raise UnsupportedModelError(
        f"{path} is no model file: give a folder with config.json, or a file that ends in .gguf, "
        f".safetensors or {', '.join(_TORCH_SUFFIXES)}."
    )


def _open_folder(folder: Path, overrides: dict[str, Any]) -> Checkpoint:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = shards_of(index)
        files = [folder / name for name in sorted(set(weight_map.values()))]
        source = SafetensorsSource(files, weight_map)
        return _open_hf(folder, "safetensors", source, folder, overrides)
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    files = [folder / name for name in names if name.endswith(".safetensors")]
    if files:
        chosen = _choose(folder, files, "model.safetensors")
        return _open_hf(folder, "safetensors", SafetensorsSource(chosen), folder, overrides)
    files = [folder / name for name in names if name.lower().endswith(".gguf")]
    if files:
        if set(split_parts(files[0])) != set(files):
            raise InvalidModelError(
                f"{folder} holds {len(files)} GGUF files: {_listed(files)}. Give the path of one."
            )
        return _open_gguf(files[0], overrides)
    index = folder / "pytorch_model.bin.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(shards_of(index).values()))]
        return _open_hf(folder, "torch", TorchSource(files), folder, overrides)
    files = [folder / name for name in names if name.endswith(_TORCH_SUFFIXES)]
    # Left over by trainers; they hold no weights.
    files = [file for file in files if file.stem not in ("training_args", "optimizer", "scheduler")]
    if files:
        chosen = _choose(folder, files, "pytorch_model.bin")
        return _open_hf(folder, "torch", TorchSource(chosen), folder, overrides)
    raise InvalidModelError(
        f"{folder} holds no weights: no .safetensors, .gguf or {', '.join(_TORCH_SUFFIXES)} file "
        f"among its {len(names)} files. Download the model again, or give another folder."
    )


def _choose(folder: Path, files: list[Path], preferred: str) -> list[Path]:
    """The one weight file of a folder without an index."""
    named = [file for file in files if file.name == preferred]
    if named or len(files) == 1:
        return named or files
    raise InvalidModelError(
        f"{folder} holds {len(files)} weight files and neither {preferred} nor an index that joins "
        f"them: {_listed(files)}. Download {preferred}.index.json, or give the path of one file."
    )


def _listed(files: list[Path]) -> str:
    return ", ".join(file.name for file in files[:4]) + (" ..." if len(files) > 4 else "")


def _open_gguf(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    return gguf_checkpoint(path, GGUFSource(path), overrides)


def gguf_checkpoint(path: Path, source: GGUFSource, overrides: Mapping[str, Any]) -> Checkpoint:
    config = CheckpointConfig(merged(source.config, overrides), str(path))
    return Checkpoint(
        path, "gguf", source, config, source.generation_config, {}, gguf=source.header
    )


def _open_hf(
    path: Path,
    format: str,
    files_source: SafetensorsSource | TorchSource,
    folder: Path,
    overrides: dict[str, Any],
) -> Checkpoint:
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise InvalidModelError(
            f"{folder} has no config.json beside its weights. Download it from where the weights "
            "come from."
        )
    values = read_config(config_path, overrides)
    source: TensorSource = files_source
    table = values.get("quantization_config")
    if isinstance(table, Mapping) and table.get("quant_method") in tuple(METHODS):
        source = QuantizedSource(files_source, table, str(config_path))
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    files = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    config = CheckpointConfig(values, str(config_path))
    return Checkpoint(path, format, source, config, generation, files)


def read_config(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with overrides; a text model's nested ``text_config`` is brought up."""
    values = merged(_read_json(path), overrides)
    nested, names = values.get("text_config"), values.get("architectures")
    is_text_only = isinstance(names, list) and any(
        isinstance(name, str) and name.endswith("ForCausalLM") for name in names
    )
    if is_text_only and isinstance(nested, dict):
        outer = {key: value for key, value in values.items() if key != "text_config"}
        inner = {key: value for key, value in nested.items() if key != "architectures"}
        values = {**outer, **inner}
    return values


def merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``overrides``; where both have an object, its fields are merged."""
    result = dict(base)
    for key, value in overrides.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def _read_json(path: Path) -> dict[str, Any]:
    try:
        require_regular(path)
        return parse_json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidModelError(
            f"{path} cannot be read: {error.strerror or error}. Check its permissions."
        ) from None


class TorchSource:
    """Weights of ``.bin`` or ``.pt`` files, through torch's weights-only loader, mapped."""

    quantization: str | None = None

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            self._tensors.update(_load_torch_file(file))
        tensors = self._tensors.values()
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.num_parameters = sum(tensor.numel() for tensor in tensors)
        sizes: Counter[str] = Counter()
        for tensor in tensors:
            name = str(tensor.dtype).removeprefix("torch.")
            sizes[name] += tensor.numel() * tensor.element_size()
        self.dtype_name = sizes.most_common(1)[0][0]

    def names(self) -> list[str]:
        return list(self._tensors)

    def release_pages(self) -> None:
        """PyTorch maps these files; they stay as they are."""

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def load(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def dtype_of(self, name: str) -> str:
        return str(self._tensors[name].dtype).removeprefix("torch.")

    def read_bytes(self, name: str) -> bytes:
        import torch

        tensor = self._tensors[name].contiguous().flatten()
        return bytes(tensor.view(torch.uint8).tolist())

    def quantized_form(self, name: str) -> None:
        return None

    def load_quantized(self, name: str, unpack: Unpack | None = None) -> torch.Tensor:
        return self._tensors[name]


def _load_torch_file(path: Path) -> dict[str, torch.Tensor]:
    import torch

    require_regular(path)
    if not zipfile.is_zipfile(path):
        raise InvalidModelError(
            f"{path} is truncated, or in torch's old format, which cannot be mapped. Download it "
            "again, or convert it to safetensors."
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # A file that is refused, and a damaged one, can raise nearly anything in there.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidModelError(
            f"{path} is refused by torch's weights-only loader ({reason}). Convert it to "
            "safetensors, or download it again."
        ) from None
    if not isinstance(state, dict) or not state:
        raise InvalidModelError(
            f"{path} holds a {type(state).__name__}, not a table of tensors. Convert it to "
            "safetensors."
        )
    wrong = next((key for key, item in state.items() if not isinstance(item, torch.Tensor)), None)
    if wrong is not None:
        raise InvalidModelError(
            f"{path} holds '{wrong}', which is no tensor. Save the model's state_dict alone, or "
            "convert it to safetensors."
        )
    return state
