"""A model's sizes, from its configuration or its files' headers alone: no weights, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ambidex.memory.weight_places import ModuleSize, WeightKind


@dataclass(frozen=True, slots=True)
class WeightShape:
    """One parameter as the engine holds it; the paths and rows are those of the built model."""

    #: ``layers.3.mlp.gate_up.weight``
    path: str
    #: Outputs and inputs of the matrix; a vector has one column. Of one expert, where
    #: there are several.
    rows: int
    columns: int
    kind: WeightKind
    #: One of ``profile.WEIGHT_FORMS``: which product multiplies with it.
    form: str
    #: As held, with scales; of all experts.
    num_bytes: int
    #: Experts that are held, and those that one token uses.
    num_experts: int = 1
    num_chosen: int = 1
    #: In the checkpoint.
    names: tuple[str, ...] = ()
    #: A gate and what it is multiplied with lie in pairs: half the rows come out.
    is_paired: bool = False
    #: Of ``num_bytes``, what every part of the rows has: an order of the inputs, a codebook.
    fixed_bytes: int = 0

    @property
    def num_parameters(self) -> int:
        return self.rows * self.columns * self.num_experts

    @property
    def module(self) -> ModuleSize:
        """The same as placement sees it."""
        rows = self.rows * self.num_experts // (2 if self.is_paired else 1)
        return ModuleSize(self.path, self.num_bytes, rows, self.kind, self.names, self.fixed_bytes)


@dataclass(frozen=True, slots=True)
class KVShape:
    """Layers whose keys and values are kept alike."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    #: Of one token over the group's layers: both keys and values, with int8's scales.
    bytes_per_token: int
    #: Tokens that a layer looks back; None: all.
    window: int | None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost model and the planner know of a model."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    head_dim: int
    #: In the order in which a step uses them.
    weights: tuple[WeightShape, ...]
    kv: tuple[KVShape, ...]
    #: The longest context, rope scaling included; None: the configuration does not say.
    max_positions: int | None
    #: How weights are held, for people: "bfloat16", "Q4_K_M file, as stored".
    description: str = ""
    #: Of the layers that have experts: how many, and how many a token chooses; 0 without.
    num_experts: int = 0
    num_chosen: int = 0
    #: What ``--dtype`` and ``--kv-cache-dtype`` come to.
    dtype: str = "float32"
    kv_dtype: str = "float32"
    #: Of the rotation tables, for each position; see ``layers/rope.py``.
    rope_bytes_per_position: int = 0
    #: Sentences that the user should read.
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        return sum(weight.num_parameters for weight in self.weights)

    @property
    def num_active_parameters(self) -> int:
        """Those that one token uses, as model cards count them: of experts the chosen ones, and
        all else, tables that are looked up included."""
        return sum(w.rows * w.columns * w.num_chosen for w in self.weights)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def is_plain(self) -> bool:
        """Whether matrices are numbers of 16 bits or more, which ``--quantization`` makes fewer."""
        matrices = [w for w in self.weights if w.kind is not WeightKind.VECTOR]
        return sum(w.num_bytes for w in matrices) * 8 >= 15 * sum(
            w.num_parameters for w in matrices
        )

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.kv)

    @property
    def modules(self) -> list[ModuleSize]:
        """The weights as placement sees them."""
        return [weight.module for weight in self.weights]


def form_of(bits: float) -> str:
    """The form of weights that take so many bits each, scales included."""
    forms = (("int4", 5), ("int5", 6), ("int6", 7), ("int8", 10), ("bfloat16", 20))
    return next((form for form, most in forms if bits < most), "float32")
