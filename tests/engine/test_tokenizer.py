"""Loading, encoding, decoding and streaming; transformers and naive code are the references."""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from ambidex.engine.detokenizer import Detokenizer
from ambidex.engine.gguf_tokenizer import build_gguf_tokenizer
from ambidex.engine.tokenizer import MAX_CHARS_WITH_GIL, Tokenizer, TokenizerSource, load_tokenizer
from ambidex.errors import InvalidModelError, RequestError, UnsupportedModelError

DATA = Path(__file__).parents[1] / "data"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

Make = Callable[..., Path]
Train = Callable[[str], Backend]

TEXTS = [
    "Hello, world!",
    "  two  spaces and\ttabs \n\n lines ",
    "It's 1234 o'clock; they're LATE",
    "caf\u00e9 cafe\u0301 \u4f60\u597d \u043f\u0440\u0438\u0432\u0435\u0442",
    "\U0001f999\U0001f468\u200d\U0001f469\u200d\U0001f467 mixed",
    "def f(x):\n    return x + 1\n",
    "<|im_start|>user\nHi<|im_end|>",
    "</s><s> around",
    "",
    "   ",
]


def auto_tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def load(folder: Path, **source: Any) -> Tokenizer:
    return load_tokenizer(TokenizerSource(folder, None, name="tiny", **source))


def assert_like_transformers(folder: Path) -> Tokenizer:
    reference = auto_tokenizer(folder)
    tokenizer = load(folder)
    for text in TEXTS:
        for special in (True, False):
            wanted = reference.encode(text, add_special_tokens=special)
            assert tokenizer.encode(text, special) == wanted, text
        ids = tokenizer.encode(text)
        for skip in (True, False):
            wanted_text = reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert tokenizer.decode(ids, skip) == wanted_text, text
    return tokenizer


class TestLongTexts:
    def test_same_ids_as_in_one_call(self, train: Train, make_folder: Make) -> None:
        for kind in ("byte_level", "byte_fallback", "metaspace"):
            backend = train(kind)
            tokenizer = load(make_folder(backend))
            text = " \n".join(TEXTS) * 30
            assert len(text) > MAX_CHARS_WITH_GIL
            for special in (True, False):
                wanted = tokenizer.backend.encode(text, add_special_tokens=special).ids
                assert tokenizer.encode(text, special) == wanted

    def test_other_threads_run_meanwhile(self, train: Train, make_folder: Make) -> None:
        tokenizer = load(make_folder(train("byte_level")))
        text = "Hello, world! 1234 " * 60_000
        is_over = threading.Event()
        gaps = []

        def tick() -> None:
            while not is_over.is_set():
                began_s = time.monotonic()
                time.sleep(0.001)
                gaps.append(time.monotonic() - began_s)

        ticker = threading.Thread(target=tick)
        ticker.start()
        began_s = time.monotonic()
        tokenizer.encode(text)
        took_s = time.monotonic() - began_s
        is_over.set()
        ticker.join()
        assert max(gaps) < took_s / 2


class TestFolder:
    def test_byte_level_as_transformers(self, train: Train, make_folder: Make) -> None:
        folder = make_folder(train("byte_level"), eos_token="<|endoftext|>")
        assert_like_transformers(folder)

    def test_byte_fallback_as_transformers(self, train: Train, make_folder: Make) -> None:
        folder = make_folder(train("byte_fallback"), eos_token="</s>", bos_token="<s>")
        assert_like_transformers(folder)

    def test_metaspace_as_transformers(self, train: Train, make_folder: Make) -> None:
        folder = make_folder(train("metaspace"), eos_token="</s>", unk_token="<unk>")
        assert_like_transformers(folder)

    def test_tokens_that_only_the_config_adds(self, train: Train, make_folder: Make) -> None:
        folder = make_folder(
            train("byte_level"),
            eos_token={"__type": "AddedToken", "content": "<stop>", "special": True},
            additional_special_tokens=["<|tool|>"],
        )
        tokenizer = assert_like_transformers(folder)
        assert tokenizer.eos_token_ids == [tokenizer.token_id("<stop>")]
        assert tokenizer.decode(tokenizer.encode("a<|tool|>b")) == "ab"

    def test_gpt2_files(self, train: Train, tmp_path: Path) -> None:
        backend = train("byte_level")
        backend.model.save(str(tmp_path))
        config = {
            "tokenizer_class": "GPT2Tokenizer",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "add_bos_token": True,
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = assert_like_transformers(tmp_path)
        assert tokenizer.encode("a")[0] == tokenizer.bos_token_id

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_and_truncation_change_nothing(
        self, train: Train, make_folder: Make, side: str
    ) -> None:
        plain = train("byte_level")
        wanted = [plain.encode(text).ids for text in TEXTS]
        padded = train("byte_level")
        padded.enable_padding(direction=side, length=64, pad_id=0, pad_token="<|endoftext|>")
        padded.enable_truncation(4, direction=side)
        folder = make_folder(padded, padding_side=side, truncation_side=side, model_max_length=4)
        tokenizer = load(folder)
        assert [tokenizer.encode(text) for text in TEXTS] == wanted

    def test_every_source_of_eos_ids(self, train: Train, make_folder: Make) -> None:
        template = "{{ messages[0].content }}<|im_end|>"
        folder = make_folder(train("byte_level"), eos_token="<|endoftext|>", chat_template=template)
        tokenizer = load(
            folder,
            config={"eos_token_id": 7, "text_config": {"eos_token_id": 8}},
            generation_config={"eos_token_id": [9, 7]},
        )
        assert set(tokenizer.eos_token_ids) == {0, 2, 7, 8, 9}
        assert len(tokenizer.eos_token_ids) == 5

    def test_chat_templates_by_name_and_from_files(self, train: Train, make_folder: Make) -> None:
        named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
        folder = make_folder(train("byte_level"), chat_template=named)
        tokenizer = load(folder)
        message = [{"role": "user", "content": "x"}]
        assert tokenizer.apply_chat_template(message) == "A"
        assert tokenizer.apply_chat_template(message, tools=[]) == "B"
        assert tokenizer.apply_chat_template(message, chat_template="tool_use") == "B"
        (folder / "chat_template.jinja").write_text("C")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("D")
        tokenizer = load(folder)
        assert tokenizer.chat_template == "C"
        assert tokenizer.apply_chat_template(message, chat_template="rag") == "D"

    def test_a_template_of_the_users(self, train: Train, make_folder: Make) -> None:
        folder = make_folder(train("byte_level"), eos_token="<|endoftext|>", chat_template="A")
        tokenizer = load_tokenizer(TokenizerSource(folder, None), chat_template="B<|im_end|>")
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "B<|im_end|>"
        assert tokenizer.eos_token_ids == [0, 2]

    def test_without_a_template(self, train: Train, make_folder: Make) -> None:
        tokenizer = load(make_folder(train("byte_level")))
        with pytest.raises(RequestError, match=r"--chat-template.*/v1/completions"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}])

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', "\x00"])
    def test_damaged_files(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(InvalidModelError, match=r"tokenizer\.json"):
            load(tmp_path)

    def test_damaged_config(self, train: Train, make_folder: Make) -> None:
        folder = make_folder(train("byte_level"))
        (folder / "tokenizer_config.json").write_text("{oops")
        with pytest.raises(InvalidModelError, match=r"tokenizer_config\.json is not valid JSON"):
            load(folder)

    def test_missing_files(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidModelError, match=r"no tokenizer\.json"):
            load(tmp_path)
        (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
        with pytest.raises(UnsupportedModelError, match=r"tokenizer\.model but no tokenizer\.json"):
            load(tmp_path)

    def test_a_merge_without_its_token(self, tmp_path: Path) -> None:
        (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
        (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
        with pytest.raises(InvalidModelError, match="line 2"):
            load(tmp_path)


class TestText:
    def test_lone_surrogate(self, byte_level: Tokenizer) -> None:
        with pytest.raises(RequestError, match=r"U\+D83D\) is at position 2"):
            byte_level.encode("ab\ud83d")

    def test_special_tokens_in_text(self, byte_level: Tokenizer) -> None:
        ids = byte_level.encode("a<|im_end|>b")
        assert 2 in ids
        assert byte_level.decode(ids) == "ab"
        assert byte_level.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"

    def test_token_text(self, byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
        assert byte_level.token_text(1) == "<|im_start|>"
        assert byte_level.token_text(byte_level.encode(" the")[0]) == " the"
        assert byte_level.token_bytes(byte_level.encode("\U0001f980")[0]) == b"\xf0"
        newline = byte_fallback.token_id("<0x0A>")
        assert newline is not None
        assert byte_fallback.token_text(newline) == "\n"

    def test_ids_without_a_token(self, byte_level: Tokenizer) -> None:
        ids = [*byte_level.encode("ab"), 10**6, -1]
        assert byte_level.decode(ids) == "ab"

    def test_vocab_size_and_bounds(self, byte_level: Tokenizer) -> None:
        assert byte_level.vocab_size == 600
        assert byte_level.max_chars_per_token >= len("<|endoftext|>")
        assert [byte_level.token_text(i) for i in range(3)] == SPECIAL


def stream_text(stream: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    pieces = []
    start = 0
    for cut in sorted({min(c, len(ids)) for c in cuts} | {len(ids)}):
        pieces.append(stream.push(ids[start:cut]))
        start = cut
    pieces.append(stream.flush())
    return pieces


@st.composite
def ids_and_cuts(draw: st.DrawFn, vocab_size: int = 620) -> tuple[list[int], list[int]]:
    ids = draw(st.lists(st.integers(0, vocab_size), max_size=40))
    return ids, draw(st.lists(st.integers(0, 40), max_size=10))


class TestStream:
    @settings(max_examples=200, deadline=None)
    @given(case=ids_and_cuts(), skip=st.booleans())
    def test_byte_level_is_what_the_library_decodes(
        self, byte_level: Tokenizer, case: tuple[list[int], list[int]], skip: bool
    ) -> None:
        ids, cuts = case
        pieces = stream_text(byte_level.stream(skip), ids, cuts)
        assert "".join(pieces) == byte_level.decode(ids, skip)
        assert "".join(pieces) == byte_level.backend.decode(ids, skip_special_tokens=skip)

    @settings(max_examples=200, deadline=None)
    @given(case=ids_and_cuts(), skip=st.booleans())
    def test_byte_fallback_is_cut_independent(
        self, byte_fallback: Tokenizer, case: tuple[list[int], list[int]], skip: bool
    ) -> None:
        ids, cuts = case
        pieces = stream_text(byte_fallback.stream(skip), ids, cuts)
        text = byte_fallback.decode(ids, skip)
        assert "".join(pieces) == text
        library = byte_fallback.backend.decode(ids, skip_special_tokens=skip)
        # For bytes that are no UTF-8 the library counts replacements otherwise.
        assert text == library or "\ufffd" in library

    @settings(max_examples=100, deadline=None)
    @given(text=st.text(max_size=30))
    def test_text_comes_back(
        self, byte_level: Tokenizer, byte_fallback: Tokenizer, text: str
    ) -> None:
        for tokenizer in (byte_level, byte_fallback):
            ids = tokenizer.encode(text, add_special_tokens=False)
            pieces = stream_text(tokenizer.stream(), ids, range(len(ids)))
            assert "".join(pieces) == text
            assert "\ufffd" not in "".join(pieces).replace("\ufffd", "", text.count("\ufffd"))

    def test_metaspace(self, train: Train, make_folder: Make) -> None:
        tokenizer = load(make_folder(train("metaspace"), eos_token="</s>"))
        for ids in ([5, 9, 30, 1, 77], tokenizer.encode("the morning was fine"), [1, 5, 5, 6], []):
            wanted = tokenizer.backend.decode(ids)
            assert "".join(stream_text(tokenizer.stream(), ids, range(9))) == wanted

    def test_never_half_a_character(self, byte_level: Tokenizer) -> None:
        ids = byte_level.encode("\U0001f980")
        assert len(ids) == 4
        stream = byte_level.stream()
        assert [stream.push([i]) for i in ids] == ["", "", "", "\U0001f980"]
        assert stream.flush() == ""

    def test_a_character_cut_short(self, byte_level: Tokenizer) -> None:
        ids = byte_level.encode("\U0001f980")[:3]
        stream = byte_level.stream()
        assert stream.push(ids) == ""
        assert stream.flush() == "\ufffd"
        assert byte_level.decode(ids) == "\ufffd"

    def test_invalid_bytes_are_replaced_at_once(self, byte_level: Tokenizer) -> None:
        lead = byte_level.encode("\U0001f980")[0]
        stream = byte_level.stream()
        assert stream.push([lead]) == ""
        assert stream.push(byte_level.encode("a")) == "\ufffda"

    def test_first_space(self, byte_fallback: Tokenizer) -> None:
        ids = byte_fallback.encode("the abbey")
        assert byte_fallback.decode(ids) == "the abbey"
        assert byte_fallback.stream(continues=True).push(ids) == " the abbey"

    def test_a_decoder_that_is_not_bytewise(self, train: Train, make_folder: Make) -> None:
        backend = train("byte_level")
        state = json.loads(backend.to_str())
        state["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": False}
        tokenizer = load(make_folder(Backend.from_str(json.dumps(state))))
        assert not tokenizer.decoding.is_bytewise
        ids = tokenizer.encode("the morning")
        pieces = stream_text(tokenizer.stream(), ids, range(len(ids)))
        assert "".join(pieces) == tokenizer.decode(ids)


def spm_metadata(**extra: Any) -> dict[str, Any]:
    """A small sentencepiece vocabulary: specials, bytes, letters, then words by score."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(tokens)
    words = [
        *("__", "_t", "he", "_a", "in", "_the", "er", "re", "ed", "_in", "____", "aa", "ab"),
        *("aab", "aaa", "aaaa", "the", "there", "re_", "an", "and", "_and"),
    ]
    for rank, word in enumerate(words):
        tokens.append(word.replace("_", "\u2581"))
        types.append(1)
        scores.append(-float(rank))
    for rank, letter in enumerate("\u2581abdehinrt"):
        tokens.append(letter)
        types.append(1)
        scores.append(-100.0 - rank)
    tokens += ["<turn>", "<|end|>"]
    types += [4, 3]
    scores += [0.0, 0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **extra,
    }


def naive_sentencepiece(metadata: dict[str, Any], text: str) -> list[int]:
    """Joins the best-scored neighbours, leftmost first, until none is a token."""
    ids = {
        token: i
        for i, token in enumerate(metadata["tokenizer.ggml.tokens"])
        if metadata["tokenizer.ggml.token_type"][i] == 1
    }
    parts = list(("\u2581" + text.replace(" ", "\u2581")) if text else "")
    while True:
        joins = [
            (-metadata["tokenizer.ggml.scores"][ids[a + b]], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in ids
        ]
        if not joins:
            break
        _, i = heapq.nsmallest(1, joins)[0]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    output = []
    for part in parts:
        output += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return output


class TestGGUF:
    @settings(max_examples=300, deadline=None)
    @given(text=st.text(alphabet="aabt heindr\u00e9\n", max_size=24))
    def test_sentencepiece(self, text: str) -> None:
        tokenizer = spm_tokenizer()
        assert tokenizer.encode(text, False) == naive_sentencepiece(spm_metadata(), text)
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_sentencepiece_special_tokens(self) -> None:
        tokenizer = spm_tokenizer()
        assert tokenizer.bos_token_id == 1
        assert tokenizer.eos_token_ids == [2]
        turn = tokenizer.token_id("<turn>")
        end = tokenizer.token_id("<|end|>")
        ids = tokenizer.encode("the<turn>and<|end|>")
        assert ids[0] == 1
        assert {turn, end} <= set(ids)
        # A user-defined token is text, a control token is not.
        assert tokenizer.decode(ids) == "the<turn> and"
        assert tokenizer.encode("the", add_special_tokens=False)[0] != 1

    def test_sentencepiece_switches(self) -> None:
        def build(**extra: Any) -> Tokenizer:
            metadata = spm_metadata(**{f"tokenizer.ggml.{k}": v for k, v in extra.items()})
            return load_tokenizer(TokenizerSource(None, metadata))

        plain = build(add_space_prefix=False, add_bos_token=False, add_eos_token=True)
        assert plain.encode("the") == [plain.token_id("the"), 2]
        assert plain.decode(plain.encode(" the")) == " the"
        trimmed = build(remove_extra_whitespaces=True)
        assert trimmed.encode("  the   and ") == trimmed.encode("the and")

    @pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken", "default"])
    def test_byte_level(self, train: Train, pre: str) -> None:
        tokenizer = load_tokenizer(TokenizerSource(None, bpe_metadata(train, pre), name="tiny"))
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            wanted = text.replace("e\u0301", "\u00e9") if pre == "qwen2" else text
            assert tokenizer.decode(ids, skip_special_tokens=False) == wanted
        adds_bos = pre in ("llama-bpe", "tekken")
        assert (tokenizer.encode("a")[0] == 1) == adds_bos
        assert bool(tokenizer.notes) is False

    def test_digits_are_cut_as_named(self, train: Train) -> None:
        def words(pre: str, text: str) -> list[str]:
            backend = build_gguf_tokenizer(bpe_metadata(train, pre), "tiny").backend
            return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

        assert words("gpt-2", "x 1234") == ["x", "\u01201234"]
        assert words("smollm", "x 1234") == ["x", "\u0120", "1", "2", "3", "4"]
        assert words("llama-bpe", "x1234") == ["x", "123", "4"]
        assert words("qwen2", "x12") == ["x", "1", "2"]
        assert words("gpt-4o", "fooBar") == ["foo", "Bar"]
        assert words("deepseek-v3", "x1234") == ["x", "123", "4"]
        assert words("falcon", "x1234") == ["x", "123", "4"]

    def test_no_name_for_the_cut(self, train: Train) -> None:
        metadata = bpe_metadata(train, "gpt-2")
        del metadata["tokenizer.ggml.pre"]
        tokenizer = load_tokenizer(TokenizerSource(None, metadata, name="old.gguf"))
        assert "old.gguf does not name its pre-tokenizer" in tokenizer.notes[0]

    def test_unknown_cut_and_kind(self, train: Train) -> None:
        with pytest.raises(UnsupportedModelError, match=r"'nonesuch'.*qwen2.*smollm"):
            build_gguf_tokenizer(bpe_metadata(train, "nonesuch"), "x.gguf")
        metadata = bpe_metadata(train, "gpt-2") | {"tokenizer.ggml.model": "bert"}
        with pytest.raises(UnsupportedModelError, match=r"'bert'.*gpt2, llama"):
            build_gguf_tokenizer(metadata, "x.gguf")
        with pytest.raises(InvalidModelError, match="no tokenizer"):
            build_gguf_tokenizer({}, "x.gguf")

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("merges", ["a zzz"], "the merge 'a zzz'"),
            ("merges", ["a"], "the merge 'a'"),
            ("merges", [""], "the merge ''"),
            ("merges", None, "'tokenizer.ggml.merges' is missing"),
            ("token_type", [1], "1 token types for"),
            ("tokens", ["a", "a"], "only 1 of 2"),
            ("tokens", None, "'tokenizer.ggml.tokens' is missing"),
            ("tokens", 7, "tokens' is 7, not an array of texts"),
            ("tokens", "ab", "tokens' is 'ab', not an array of texts"),
            ("tokens", [1, 2], "tokens' has 1 at 0"),
            ("token_type", 1, "token_type' is 1, not an array of whole numbers"),
            ("token_type", ["a"], "token_type' has 'a' at 0"),
            ("merges", 3, "merges' is 3, not an array of texts"),
            ("merges", [3], "merges' has 3 at 0"),
            ("bos_token_id", [1], "bos_token_id' is an array, not a number"),
            ("eos_token_id", "</s>", "eos_token_id' is '</s>', not a number"),
        ],
    )
    def test_damaged_arrays(self, train: Train, key: str, value: Any, message: str) -> None:
        metadata = bpe_metadata(train, "gpt-2") | {f"tokenizer.ggml.{key}": value}
        with pytest.raises(InvalidModelError, match=message):
            build_gguf_tokenizer(metadata, "x.gguf")

    @pytest.mark.parametrize("scores", [1.0, "high", ["high"]])
    def test_scores_that_are_none(self, scores: Any) -> None:
        with pytest.raises(InvalidModelError, match=r"'tokenizer\.ggml\.scores'.*array of numbers"):
            build_gguf_tokenizer(spm_metadata(**{"tokenizer.ggml.scores": scores}), "x.gguf")

    def test_templates_that_are_none(self) -> None:
        with pytest.raises(InvalidModelError, match=r"'tokenizer\.chat_templates' is 5"):
            build_gguf_tokenizer(spm_metadata(**{"tokenizer.chat_templates": 5}), "x.gguf")

    @pytest.mark.parametrize(("key", "value"), [("model", ["gpt2"]), ("pre", ["qwen2"])])
    def test_a_kind_or_cut_that_is_a_list(self, train: Train, key: str, value: Any) -> None:
        metadata = bpe_metadata(train, "gpt-2") | {f"tokenizer.ggml.{key}": value}
        with pytest.raises(UnsupportedModelError, match="an array, which is not supported"):
            build_gguf_tokenizer(metadata, "x.gguf")

    def test_ids_of_turn_and_message_ends(self, train: Train) -> None:
        metadata = bpe_metadata(train, "gpt-2") | {
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.eot_token_id": 2,
            "tokenizer.ggml.eom_token_id": 10**9,
            "tokenizer.chat_template": "{{ messages[0].content }}",
        }
        tokenizer = load_tokenizer(TokenizerSource(None, metadata, {"eos_token_id": 5}))
        assert tokenizer.eos_token_ids == [0, 2, 5]
        assert tokenizer.chat_template == "{{ messages[0].content }}"
        assert tokenizer.special_tokens["eos_token"] == SPECIAL[0]

    @pytest.mark.model
    def test_smollm2(self, smollm2_metadata: Mapping[str, Any]) -> None:
        """Against a plain implementation of byte-pair encoding, recorded."""
        tokenizer = load_tokenizer(TokenizerSource(None, smollm2_metadata, name="SmolLM2"))
        vectors = json.loads((DATA / "smollm2_tokens.json").read_text(encoding="utf-8"))
        for text, ids in vectors:
            assert tokenizer.encode(text) == ids, text
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.eos_token_ids == [2]


@functools.cache
def spm_tokenizer() -> Tokenizer:
    return load_tokenizer(TokenizerSource(None, spm_metadata(), name="tiny-spm"))


def bpe_metadata(train: Train, pre: str) -> dict[str, Any]:
    model = json.loads(train("byte_level").to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
