"""What quantised computation costs in quality: perplexity and KL against float32.

    python benchmarks/fidelity.py MODEL [MODEL ...] [--text FILE] [--tokens 20000] [--context 512]
        [--option NAME=VALUE ...] [--reference MODEL] [--tokenizer FOLDER_OR_FILE]

Each model runs twice in the same engine: as its options say, and with ``--dtype float32``, which
computes the dequantised weights exactly. Weights that are quantised on load need a reference that
holds what they become: ``benchmarks/make_models.py folder ... --as int8-values``. The text is cut
into windows of ``context`` tokens, and every token of a window but the first is scored by those
before it. The KL divergence is that of the two distributions at each scored position, from
float32's, in nats.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ambidex import LLM, SamplingParams
from ambidex.runner.batch import build_batch
from ambidex.runner.decision import NewRequest, ScheduledRequest

TEXT = Path(__file__).parent.parent / "tests" / "data" / "northanger_abbey_opening.txt"
#: Logits are computed for this many rows at a time, to bound their memory.
_ROWS = 128


@dataclass(frozen=True)
class Fidelity:
    """How far one model is from its float32 self, over ``num_tokens`` scored tokens."""

    num_tokens: int
    perplexity: float
    reference_perplexity: float
    #: Nats.
    mean_kl: float
    max_kl: float
    #: Share of positions where both have the same most likely token.
    same_best: float

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.01 is one percent worse."""
        return self.perplexity / self.reference_perplexity - 1


class Scorer:
    """Computes a window's distributions with a loaded engine, in the lane's thread.

    The KV cache's first blocks are used: no request may run meanwhile.
    """

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Final hidden states of a window: [num_tokens, width]."""
        return self._in_lane(self._hidden, list(token_ids))

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log probabilities of the next token: [rows, vocabulary] float32."""
        return self._in_lane(self._log_probs, hidden)

    def _in_lane(self, function: Any, argument: Any) -> Tensor:
        with torch.inference_mode():
            result: Tensor = self._engine._executor.call("cpu", function, argument).result()
        return result

    @torch.inference_mode()
    def _hidden(self, token_ids: list[int]) -> Tensor:
        runner = self._engine.lane.runner
        size = runner.kv_cache.block_size
        blocks = list(range(math.ceil(len(token_ids) / size)))
        assert all(len(blocks) <= count for count in runner.kv_cache.num_blocks)
        tables = tuple(blocks for _ in runner.kv_cache.groups)
        new = NewRequest(SamplingParams(temperature=0.0), token_ids, len(token_ids))
        request = ScheduledRequest("window", token_ids, 0, tables, sample=False, new=new)
        batch = build_batch([request], runner.kv_cache, runner.device.kernels.row_pad)
        # The result may lie in memory that the next step uses again.
        hidden: Tensor = runner.model(batch)[: len(token_ids)].clone()
        return hidden

    @torch.inference_mode()
    def _log_probs(self, hidden: Tensor) -> Tensor:
        logits = self._engine.lane.runner.model.head(hidden)
        return torch.log_softmax(logits.float(), dim=-1)


def compare(model: LLM, reference: LLM, token_ids: Sequence[int], context: int = 512) -> Fidelity:
    """``model`` against ``reference`` on a text of at least two tokens."""
    ours, theirs = Scorer(model), Scorer(reference)
    num_tokens, loss, reference_loss, kl, max_kl, same = 0, 0.0, 0.0, 0.0, 0.0, 0
    for first in range(0, len(token_ids) - 1, context):
        window = list(token_ids[first : first + context])
        if len(window) < 2:
            break
        targets = torch.tensor(window[1:])
        our_hidden, their_hidden = ours.hidden(window), theirs.hidden(window)
        for row in range(0, len(targets), _ROWS):
            chosen = targets[row : row + _ROWS, None]
            end = row + len(chosen)
            p = ours.log_probs(our_hidden[row:end])
            q = theirs.log_probs(their_hidden[row:end])
            num_tokens += len(chosen)
            loss -= float(p.gather(1, chosen).double().sum())
            reference_loss -= float(q.gather(1, chosen).double().sum())
            each = (q.exp() * (q - p)).double().sum(dim=1)
            kl += float(each.sum())
            max_kl = max(max_kl, float(each.max()))
            same += int((p.argmax(dim=1) == q.argmax(dim=1)).sum())
    assert num_tokens > 0, "the text is too short"
    return Fidelity(
        num_tokens=num_tokens,
        perplexity=math.exp(loss / num_tokens),
        reference_perplexity=math.exp(reference_loss / num_tokens),
        mean_kl=kl / num_tokens,
        max_kl=max_kl,
        same_best=same / num_tokens,
    )


def load(model: str, context: int, **options: Any) -> LLM:
    """An engine that has room for one window."""
    return LLM(model, **{"max_model_len": context, "max_num_seqs": 1} | options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--reference", help="whose float32 weights count, if not each model's own")
    parser.add_argument("--tokenizer", help="of both, where the files have none")
    args = parser.parse_args()
    shared = {"tokenizer": args.tokenizer} if args.tokenizer else {}
    options: dict[str, Any] = shared | dict(option.split("=", 1) for option in args.option)
    print(f"{args.text.name}, at most {args.tokens} tokens, windows of {args.context}")
    print("| model | tokens | perplexity | float32 | change | mean KL | largest KL | same best |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for model in args.models:
        with load(model, args.context, **options) as ours:
            token_ids = ours.get_tokenizer().encode(args.text.read_text())[: args.tokens]
            source = args.reference or model
            with load(source, args.context, dtype="float32", **shared) as reference:
                found = compare(ours, reference, token_ids, args.context)
        label = " ".join([Path(model).name, *args.option])
        print(
            f"| {label} | {found.num_tokens} | {found.perplexity:.4f} | "
            f"{found.reference_perplexity:.4f} | {found.perplexity_change:+.3%} | "
            f"{found.mean_kl:.6f} | {found.max_kl:.4f} | {found.same_best:.2%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
