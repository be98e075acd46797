"""What every kernel table offers. ``kernels/reference.py`` defines what each operation computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ambidex.kernels.metadata import AttentionMetadata
    from ambidex.kernels.quantized import Quantized
    from ambidex.kernels.rows import TensorRows


class Weight(Protocol):
    """A matrix in the layout of a kernel table."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def num_bytes(self) -> int: ...

    def rows(self, start: int, end: int) -> Weight:
        """Rows ``start`` to ``end`` in the same memory. Both are multiples of 16, or the end."""

    def gather(
        self, ranges: Sequence[tuple[int, int]], store: Callable[[list[Tensor]], Tensor]
    ) -> Weight:
        """Those rows, one range behind the other, as ``rows`` cuts them; ``store`` copies pieces
        of bytes, one behind the other, to where they shall lie."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Weight:
        """The same matrix over what ``move`` gives for each piece of its memory."""


class Kernels(Protocol):
    """Activations are float32 [n, width]; results have memory of their own."""

    name: str
    #: For people: the table, and what it runs on.
    description: str
    #: Rows of a batch are padded to a multiple of this.
    row_pad: int
    #: Whether a step can be recorded and replayed; see ``kernels/cpu/recording.py``.
    can_record: bool
    #: Whether attention copies keys and values out of the cache before it reads them: for the
    #: longest context that takes memory, which is reserved.
    gathers_kv: bool
    ACTIVATIONS: Mapping[str, Any]

    def put(self, x: Tensor) -> Tensor:
        """``x``, of the host, where these kernels can read it."""

    def fetch(self, x: Tensor) -> Tensor:
        """``x`` in the host's memory, once it has been computed."""

    def begin_step(self, num_tokens: int, num_logits: int) -> None:
        """Tell how many rows the products of the step have that is launched next."""

    def end_step(self) -> None:
        """Tell that all of the step has been launched."""

    def pack(self, weight: Tensor | Quantized | TensorRows, precise: bool = False) -> Weight:
        """A matrix [out, in] in this table's layout; float32, float16, bfloat16 or low-bit.
        ``precise``: with low bits, activations are rounded less."""

    def packed_bytes(self, shape: tuple[int, int], dtype: torch.dtype) -> int:
        """Bytes that :meth:`pack` holds for a matrix of numbers."""

    def pack_table(self, weight: Tensor | Quantized | TensorRows) -> Weight:
        """A table whose rows :meth:`embedding` reads."""

    def pack_head(self, table: Weight) -> Weight:
        """What :meth:`linear` multiplies with where the head is tied to an embedding's table."""

    def head_bytes(self, shape: tuple[int, int], dtype: torch.dtype) -> int:
        """Bytes that :meth:`pack_head` takes beside the table."""

    def pack_parts(
        self, parts: Sequence[Tensor | Quantized | TensorRows], precise: bool = False
    ) -> Weight:
        """:meth:`pack` of the rows of all ``parts``, one below the other; forms may differ."""

    def unpack_gguf(self, name: str, type_name: str, rows: Any, columns: int) -> Quantized | None:
        """Rows of a GGUF block format [rows, bytes a row] uint8; None where ``quant.gguf`` is to
        read them."""

    def compress_words(self, words: Tensor, unit_words: int, max_bytes: int) -> Tensor | None:
        """``words`` of two bytes without loss, uint8 [n]; None where that would be more than
        ``max_bytes``. It may be cut at every multiple of ``unit_words``; see ``quant.lossless``."""

    def decompress_words(self, payload: Tensor, num_words: int, out: Tensor) -> None:
        """Writes the ``num_words`` that :meth:`compress_words` made ``payload`` of to ``out``."""

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``x`` times ``weight`` transposed, plus ``bias`` [out], plus ``residual`` [n, out]."""

    def gated_linear(
        self, x: Tensor, weight: Weight, activation: str, bias: Tensor | None = None
    ) -> Tensor:
        """``activation(gate) * up`` where ``weight`` [2 * width, in] has the gate's rows first."""

    def embedding(self, token_ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        """Rows ``token_ids`` of the matrix, times ``scale``."""

    def position_rows(self, table: Tensor, positions: Tensor) -> Tensor:
        """Rows ``positions`` of a float32 table."""

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float = 0.0,
        residual: Tensor | None = None,
    ) -> Tensor: ...

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor: ...

    def add(self, x: Tensor, y: Tensor) -> Tensor: ...

    def activate(self, x: Tensor, activation: str) -> Tensor: ...

    def softcap(self, x: Tensor, cap: float) -> Tensor: ...

    def take_logit_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Those rows of ``x``, from which logits are computed."""

    def rope(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Turn [n, heads, head_dim] by the rows ``positions`` [n] of the tables [m, width]. It may
        work in place."""

    def kv_layout(
        self, num_kv_heads: int, num_slots: int, head_dim: int, dtype: torch.dtype
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of a layer's KV cache, all zero at first."""

    def write_kv(
        self, key: Tensor, value: Tensor, cache: tuple[Tensor, ...], metadata: AttentionMetadata
    ) -> None: ...

    def attention(
        self,
        query: Tensor,
        cache: tuple[Tensor, ...],
        metadata: AttentionMetadata,
        scale: float,
        softcap: float = 0.0,
    ) -> Tensor: ...

    def route_experts(
        self, router_logits: Tensor, top_k: int, *, normalise: bool, softmax_first: bool = True
    ) -> tuple[Tensor, Tensor]: ...

    def moe(
        self,
        x: Tensor,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        weights: Tensor,
        experts: Tensor,
        activation: str,
    ) -> Tensor:
        """``gate_up`` and ``down``: one matrix an expert."""

    def expert_outputs(
        self,
        x: Tensor,
        gate_up: Sequence[Weight | None],
        down: Sequence[Weight | None],
        experts: Tensor,
        activation: str,
    ) -> Tensor:
        """What :meth:`moe` adds up, before it is weighted: [n, top_k, hidden]; zero for experts
        that are None."""

    def combine_experts(self, parts: Sequence[Tensor], weights: Tensor, experts: Tensor) -> Tensor:
        """The same bits as :meth:`moe`, of results [n, top_k, hidden]: a choice's is in one of the
        ``parts``, and the others are zero there."""
