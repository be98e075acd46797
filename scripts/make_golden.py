"""Writes tests/data/golden_smollm2.json: what transformers generates greedily from the default
model, in float32 on the dequantised weights. Usage: python scripts/make_golden.py MODEL.gguf

For every prompt: its token ids, 64 greedy tokens, and the gap between the best two logits at
each position, which says how far an implementation may be expected to agree.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 64
DATA = Path(__file__).parent.parent / "tests" / "data"


def prompts() -> dict[str, str]:
    """Name -> text: chat, prose, code, other scripts, numbers, white space, short and long."""
    novel = (DATA / "northanger_abbey_opening.txt").read_text()

    def chat(text: str) -> str:
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        return (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    return {
        "chat-fact": chat("What is the capital of France?"),
        "chat-list": chat("Name five things that float on water."),
        "chat-story": chat("Write a short story about a lighthouse keeper who finds a letter."),
        "prose": "Once upon a time, in a village at the edge of the forest,",
        "one-token": "The",
        "code": 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
        "json": '{"name": "Ada", "born": 1815, "languages": ["English",',
        "french": "La Révolution française a commencé en",
        "scripts": "Hello, 世界! Привет, мир! γειά σου Κόσμε 👋🏽 —",
        "numbers": "1, 1, 2, 3, 5, 8, 13, 21,",
        "white-space": " \n\n  \t ",
        "question": "Q: Why do leaves change colour in autumn?\nA:",
        "novel-300": novel[:1300],
        "novel-800": novel[1000:4600],
        "novel-1500": novel[:6700],
    }


@torch.inference_mode()
def main(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    rows = []
    for name, text in prompts().items():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        state = model(torch.tensor([ids]), use_cache=True)
        tokens, gaps = [], []
        for _ in range(NUM_TOKENS):
            best = torch.topk(state.logits[0, -1].float(), 2)
            tokens.append(int(best.indices[0]))
            gaps.append(round(float(best.values[0] - best.values[1]), 5))
            state = model(
                torch.tensor([[tokens[-1]]]), past_key_values=state.past_key_values, use_cache=True
            )
        rows.append(
            {"name": name, "prompt": text, "prompt_ids": ids, "tokens": tokens, "gaps": gaps}
        )
        print(f"{name}: {len(ids)} prompt tokens, smallest gap {min(gaps)}")
    golden = {
        "model": path.name,
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "rows": rows,
    }
    (DATA / "golden_smollm2.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
