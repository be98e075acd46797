"""Names of weights in checkpoints, and which parameters of a model they fill: tables, no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ambidex.errors import InvalidModelError

#: The part that stands for all parts: a checkpoint may hold a fused parameter in one tensor.
WHOLE = "*"

#: A layer or an expert.
_NUMBER = re.compile(r"(?<=[.:])\d+(?=\.|$)")
_FIELD = re.compile(r"\\\{(\w+)\\\}")

Names = Mapping[str, str | None]


class NameTable:
    """Checkpoint names to parameter paths, and back.

    Keys and values use ``{name}`` for what carries over, for example
    ``"model.layers.{i}.self_attn.q_proj.{w}": "layers.{i}.attention.qkv.{w}:q"``; the text after
    a colon names the part of a fused parameter. A value of None says that the tensor is known
    and not needed. Where several names lead to one part, the first is the one that is published.
    """

    def __init__(self, names: Names) -> None:
        self._paths = _Rules(names.items())
        self._names = _Rules((path, name) for name, path in names.items() if path is not None)

    def find(self, name: str) -> tuple[str, str] | None:
        """``(path, part)``, or None for a known tensor that is not needed.

        Files saved from a model without its head lack the prefix ``model.``. Raises KeyError for a
        name that no rule matches.
        """
        try:
            target = self._paths.find(name)
        except KeyError:
            target = self._paths.find(f"model.{name}")
        if target is None:
            return None
        path, _, part = target.partition(":")
        return path, part

    def name_of(self, path: str, part: str = "") -> str:
        """What checkpoints call a part of the parameter ``path``. Raises KeyError where none has
        it by itself."""
        name = self._names.find(f"{path}:{part}" if part else path)
        assert name is not None
        return name

    def paths(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Which of ``names`` make up each parameter, by path."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in names:
            try:
                target = self.find(name)
            except KeyError:
                continue
            if target is not None:
                found[target[0]].append(name)
        return found


class _Rules:
    """Patterns and what they become; the first that matches counts."""

    def __init__(self, rules: Iterable[tuple[str, str | None]]) -> None:
        self._rules = [
            (re.compile(_FIELD.sub(r"(?P<\1>[^.:]+)", re.escape(pattern))), target)
            for pattern, target in rules
        ]
        #: Names that differ in numbers alone share a rule: a checkpoint has thousands of them.
        self._chosen: dict[str, tuple[re.Pattern[str], str | None] | None] = {}

    def find(self, text: str) -> str | None:
        form = _NUMBER.sub("0", text)
        if form not in self._chosen:
            fitting = (rule for rule in self._rules if rule[0].fullmatch(text))
            self._chosen[form] = next(fitting, None)
        chosen = self._chosen[form]
        match = chosen[0].fullmatch(text) if chosen else None
        if chosen is None or match is None:
            raise KeyError(text)
        return None if chosen[1] is None else chosen[1].format(**match.groupdict())


def check_part(
    parts: Mapping[str, tuple[int, int]],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    part: str,
    shape: tuple[int, ...],
    name: str,
    filled: set[str],
) -> tuple[int, int]:
    """First row and rows of ``part`` of a parameter, which is added to the ``filled`` ones.

    ``parts``: part -> (first row, rows) of the first of ``shapes``; the second is that of a tensor
    that holds all of them. Raises InvalidModelError where there is no such part, where it has
    another shape than the checkpoint's tensor ``name``, or where an earlier tensor filled it.
    """
    whole, stacked = shapes
    if part == WHOLE:
        first, rows, expected = 0, whole[0], stacked
    elif part in parts:
        first, rows = parts[part]
        expected = (rows, *whole[1:])
    else:
        raise InvalidModelError(
            f"Tensor {name} has no place: the configuration asks for {len(parts)} such "
            "tensors. The checkpoint and its config.json do not belong together."
        )
    if shape != expected:
        raise InvalidModelError(
            f"Tensor {name} has shape {list(shape)}; the configuration asks for "
            f"{list(expected)}. The checkpoint and its config.json do not belong together."
        )
    added = set(parts) if part == WHOLE else {part}
    if not filled.isdisjoint(added):
        raise InvalidModelError(
            f"Tensor {name} is there twice: the files hold the same weight under another name, "
            "too, such as one with and one without 'model.' before it. Remove one of the two, "
            "or download the model again."
        )
    filled |= added
    return first, rows


_LAYER = "model.layers.{i}."

LLAMA: Names = {
    "model.embed_tokens.weight": "embedding.weight",
    _LAYER + "input_layernorm.weight": "layers.{i}.attention_norm.weight",
    _LAYER + "self_attn.q_proj.{w}": "layers.{i}.attention.qkv.{w}:q",
    _LAYER + "self_attn.k_proj.{w}": "layers.{i}.attention.qkv.{w}:k",
    _LAYER + "self_attn.v_proj.{w}": "layers.{i}.attention.qkv.{w}:v",
    _LAYER + "self_attn.o_proj.{w}": "layers.{i}.attention.output.{w}",
    _LAYER + "self_attn.rotary_emb.inv_freq": None,
    _LAYER + "post_attention_layernorm.weight": "layers.{i}.mlp_norm.weight",
    _LAYER + "mlp.gate_proj.{w}": "layers.{i}.mlp.gate_up.{w}:gate",
    _LAYER + "mlp.up_proj.{w}": "layers.{i}.mlp.gate_up.{w}:up",
    _LAYER + "mlp.down_proj.{w}": "layers.{i}.mlp.down.{w}",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}

QWEN3: Names = {
    **LLAMA,
    _LAYER + "self_attn.q_norm.weight": "layers.{i}.attention.q_norm.weight",
    _LAYER + "self_attn.k_norm.weight": "layers.{i}.attention.k_norm.weight",
}

PHI3: Names = {
    _LAYER + "self_attn.qkv_proj.weight": "layers.{i}.attention.qkv.weight:*",
    _LAYER + "mlp.gate_up_proj.weight": "layers.{i}.mlp.gate_up.weight:*",
    **LLAMA,
}

_MIXTRAL_EXPERTS = {
    "gate.weight": "router.weight",
    "experts.{e}.w1.weight": "gate_up:{e}.gate",
    "experts.{e}.w3.weight": "gate_up:{e}.up",
    "experts.{e}.w2.weight": "down:{e}",
    "experts.gate_up_proj": "gate_up:*",
    "experts.down_proj": "down:*",
}
MIXTRAL: Names = {
    **LLAMA,
    **{
        f"model.layers.{{i}}.{module}.{name}": f"layers.{{i}}.mlp.{path}"
        for module in ("block_sparse_moe", "mlp")
        for name, path in _MIXTRAL_EXPERTS.items()
    },
}

QWEN3_MOE: Names = {
    **QWEN3,
    _LAYER + "mlp.gate.weight": "layers.{i}.mlp.router.weight",
    _LAYER + "mlp.experts.{e}.gate_proj.weight": "layers.{i}.mlp.gate_up:{e}.gate",
    _LAYER + "mlp.experts.{e}.up_proj.weight": "layers.{i}.mlp.gate_up:{e}.up",
    _LAYER + "mlp.experts.{e}.down_proj.weight": "layers.{i}.mlp.down:{e}",
    _LAYER + "mlp.experts.gate_up_proj": "layers.{i}.mlp.gate_up:*",
    _LAYER + "mlp.experts.down_proj": "layers.{i}.mlp.down:*",
}

_GEMMA3_TEXT: Names = {
    **QWEN3,
    _LAYER + "post_attention_layernorm.weight": "layers.{i}.attention_out_norm.weight",
    _LAYER + "pre_feedforward_layernorm.weight": "layers.{i}.mlp_norm.weight",
    _LAYER + "post_feedforward_layernorm.weight": "layers.{i}.mlp_out_norm.weight",
}
#: Also the language model inside an image model, as older and newer files name it.
GEMMA3: Names = {
    **_GEMMA3_TEXT,
    **{
        prefix + name.removeprefix(strip): path
        for name, path in _GEMMA3_TEXT.items()
        for prefix, strip in (("language_model.", ""), ("model.language_model.", "model."))
    },
}

_DECODER = "model.decoder.layers.{i}."
OPT: Names = {
    "model.decoder.embed_tokens.weight": "embedding.weight",
    "model.decoder.embed_positions.weight": "positions.weight",
    "model.decoder.project_in.weight": "project_in.weight",
    "model.decoder.project_out.weight": "project_out.weight",
    "model.decoder.final_layer_norm.{w}": "norm.{w}",
    _DECODER + "self_attn.q_proj.{w}": "layers.{i}.qkv.{w}:q",
    _DECODER + "self_attn.k_proj.{w}": "layers.{i}.qkv.{w}:k",
    _DECODER + "self_attn.v_proj.{w}": "layers.{i}.qkv.{w}:v",
    _DECODER + "self_attn.out_proj.{w}": "layers.{i}.output.{w}",
    _DECODER + "self_attn_layer_norm.{w}": "layers.{i}.attention_norm.{w}",
    _DECODER + "fc1.{w}": "layers.{i}.mlp.up.{w}",
    _DECODER + "fc2.{w}": "layers.{i}.mlp.down.{w}",
    _DECODER + "final_layer_norm.{w}": "layers.{i}.mlp_norm.{w}",
    "lm_head.weight": "head.weight",
}

#: The language model of Llama 3.2 with images: every few layers look at the image.
MLLAMA: Names = {
    "language_model." + name: path
    for name, path in {
        **LLAMA,
        _LAYER + "cross_attn.q_proj.weight": "layers.{i}.cross.query.weight",
        _LAYER + "cross_attn.k_proj.weight": "layers.{i}.cross.key_value.weight:k",
        _LAYER + "cross_attn.v_proj.weight": "layers.{i}.cross.key_value.weight:v",
        _LAYER + "cross_attn.o_proj.weight": "layers.{i}.cross.output.weight",
        _LAYER + "cross_attn.q_norm.weight": "layers.{i}.cross.q_norm.weight",
        _LAYER + "cross_attn.k_norm.weight": "layers.{i}.cross.k_norm.weight",
        _LAYER + "cross_attn_attn_gate": "layers.{i}.attention_gate",
        _LAYER + "cross_attn_mlp_gate": "layers.{i}.mlp_gate",
    }.items()
}
