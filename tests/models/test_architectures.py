"""Every architecture against transformers: logits, greedy tokens, chunking."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, Case, hash_of, make_reference
from harness import Loaded, Session, load
from torch import Tensor

torch.set_num_threads(1)

#: Where the best two logits of the reference are closer than this, either token is right.
TIE = 1e-3
TOLERANCE = 1e-4
NUM_NEW = 64
LENGTHS = {"a": 90, "b": 5, "c": 37, "d": 1}


@dataclass
class Pair:
    case: Case
    reference: Any
    folder: Path
    loaded: Loaded
    prompts: dict[str, list[int]]

    def expected(self, token_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor([token_ids])).logits[0]


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    reference = make_reference(case)
    reference.save_pretrained(folder)
    if case.prepare is not None:
        case.prepare(reference, case.max_model_len)
    loaded = load(folder, max_model_len=case.max_model_len)
    draw = random.Random(hash_of(case.name))
    vocab = case.values["vocab_size"]
    room = case.max_model_len - NUM_NEW
    prompts = {
        name: [draw.randrange(3, vocab) for _ in range(length if room >= 90 else -(-length // 9))]
        for name, length in LENGTHS.items()
    }
    return Pair(case, reference, folder, loaded, prompts)


def test_loads_every_tensor(pair: Pair) -> None:
    # A tied head may be saved beside the embedding.
    assert set(pair.loaded.unused) <= {"lm_head.weight"}


def test_logits(pair: Pair) -> None:
    logits = Session(pair.loaded).run(pair.prompts, budget=10_000)
    for name, tokens in pair.prompts.items():
        expected = pair.expected(tokens)
        assert logits[name].shape == expected.shape
        assert (logits[name] - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(("budget", "block_size"), [(7, 8), (16, 16), (41, 64), (64, 128)])
def test_chunked_is_exact(pair: Pair, budget: int, block_size: int) -> None:
    whole = Session(pair.loaded).run(pair.prompts, budget=10_000)
    session = Session(pair.loaded, block_size=block_size, seed=budget)
    chunked = session.run(pair.prompts, budget=budget)
    for name in pair.prompts:
        assert torch.equal(chunked[name], whole[name])


def test_greedy(pair: Pair, record_property: Any) -> None:
    """In one batch, prompts of uneven length, chunked: 64 tokens each."""
    session = Session(pair.loaded)
    prefilled = session.run(pair.prompts, budget=50)
    generated = session.generate(prefilled, NUM_NEW)
    compared = 0
    for name, prompt in pair.prompts.items():
        tokens, logits = generated[name]
        # The reference reads our tokens: as long as they are its own choice, its next is what it
        # would have generated.
        expected = pair.expected(prompt + tokens)[len(prompt) - 1 : -1]
        best = expected.topk(2)
        assert (logits - expected).abs().max() < TOLERANCE
        for position, token in enumerate(tokens):
            if best.values[position, 0] - best.values[position, 1] < TIE:
                break
            assert token == best.indices[position, 0], f"prompt {name}, position {position}"
            compared += 1
    total = NUM_NEW * len(pair.prompts)
    record_property("positions_compared", f"{compared} of {total}")
    print(f"{pair.case}: {compared} of {total} positions compared")
    assert compared >= total // 2
    if any(group.window is not None for group in session.groups):
        assert session.num_blocks_left > 0


def test_options_are_in_use(pair: Pair) -> None:
    if not pair.case.matters:
        return
    prompts = {"a": pair.prompts["a"]}
    plain = Session(pair.loaded).run(prompts, budget=10_000)["a"]
    for overrides in pair.case.matters:
        changed = load(pair.folder, max_model_len=pair.case.max_model_len, overrides=overrides)
        logits = Session(changed).run(prompts, budget=10_000)["a"]
        assert (logits - plain).abs().max() > 1e-2, overrides


def test_generates_alone_as_in_a_batch(pair: Pair) -> None:
    together = Session(pair.loaded)
    batch = together.generate(together.run(pair.prompts, budget=23), 12)
    for name, prompt in pair.prompts.items():
        alone = Session(pair.loaded, block_size=32, seed=5)
        tokens, logits = alone.generate(alone.run({name: prompt}, budget=10_000), 12)[name]
        assert tokens == batch[name][0]
        assert torch.equal(logits, batch[name][1])
