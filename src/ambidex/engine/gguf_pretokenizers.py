"""How text is cut before byte-level BPE, by the name in ``tokenizer.ggml.pre``.

GGUF files name the cut instead of describing it. Each recipe here is the pipeline of the models
that carry the name: its normalizer, its cuts in order, and whether a whole word that is in the
vocabulary skips the merges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tokenizers import Regex, pre_tokenizers

_Cut = Callable[[], pre_tokenizers.PreTokenizer]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to cut text; ``cuts`` are applied in order, then bytes become characters."""

    cuts: tuple[_Cut, ...]
    #: Unicode NFC first, as these models' own tokenizers do.
    nfc: bool = False
    #: A word that is a token is taken whole, whatever the merges say.
    ignore_merges: bool = False
    #: Whether a beginning-of-sequence token is added where the file does not say.
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence([cut() for cut in self.cuts])


def _split(pattern: str) -> _Cut:
    return lambda: pre_tokenizers.Split(Regex(pattern), "isolated")


def _bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    # GPT-2's pattern is built into the library's byte-level step.
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Digits(individual_digits=True)


def _digit_runs() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Digits(individual_digits=False)


def _punctuation_runs() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Punctuation("contiguous")


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"


def _words(
    digits: str,
    *,
    contraction: str = _CONTRACTION + "|",
    lead: str = r"[^\r\n\p{L}\p{N}]?",
    letters: str = r"\p{L}+",
    symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    lines: str = r"\s*[\r\n]+",
) -> _Cut:
    """The family of patterns that began with OpenAI's cl100k."""
    return _split(f"{contraction}{lead}{letters}|{digits}|{symbols}|{lines}|{_SPACES}")


def _cased_words(digits: str, suffix: str = "") -> _Cut:
    """The family that began with o200k: a word is upper case, then lower case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return _split(
        f"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    )


#: The letters of DeepSeek-LLM's cut: those with case, as of an older Unicode, in hexadecimal.
_DEEPSEEK_LETTERS = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f "
    "386 388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd "
    "1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 "
    "1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 "
    "2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 "
    "2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 "
    "a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)


def _ranges(text: str) -> str:
    """Hexadecimal ranges as the inside of a character class."""
    return "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in text.split())


#: The character ranges of DeepSeek's cut of Chinese, Japanese and Korean, older and newer.
_CJK_OLD = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_NEW = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_FULL_WIDTH_MARKS = "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_SENTENCE_MARKS = "|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c"

_GPT2 = Recipe((_gpt2_words,))
_DIGITS_GPT2 = Recipe((_single_digits, _gpt2_words))
_CL100K = Recipe((_words(r"\p{N}{1,3}"), _bytes))
_QWEN2 = Recipe((_words(r"\p{N}"), _bytes))
_QWEN35 = Recipe(
    (
        _words(r"\p{N}", letters=r"[\p{L}\p{M}]+", symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
        _bytes,
    ),
    nfc=True,
)
_LLAMA3 = replace(_CL100K, ignore_merges=True, adds_bos=True)
_DEEPSEEK_LLM = Recipe(
    (
        _split(r"[\r\n]"),
        _split(rf"\s?[{_ranges(_DEEPSEEK_LETTERS)}]+"),
        _split(rf"\s?[!-/:-~{_FULL_WIDTH_MARKS}]+"),
        _split(r"\s+$"),
        _split(_CJK_OLD),
        _single_digits,
        _bytes,
    )
)
_DEEPSEEK_CODER = Recipe(
    (
        _split(r"[\r\n]"),
        _split(r"\s?\p{L}+"),
        _split(r"\s?\p{P}+"),
        _split(_CJK_OLD),
        _single_digits,
        _bytes,
    )
)
_DEEPSEEK_V3 = Recipe(
    (
        _split(r"\p{N}{1,3}"),
        _split(_CJK_NEW),
        _split(
            rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
        ),
        _bytes,
    )
)
_FALCON = Recipe((_punctuation_runs, _gpt2_words, _digit_runs, _split("[0-9][0-9][0-9]")))
_DEFAULT = Recipe(
    (
        _split(r"[\p{P}\$\+<=>\^~\|]+"),
        _gpt2_words,
        _split(r"\p{N}+"),
        _split("[0-9][0-9][0-9]"),
    )
)
_BLOOM_CUT = _split(rf" ?[^(\s{_SENTENCE_MARKS})]+")
_TEKKEN = Recipe((_cased_words(r"\p{N}"), _bytes), ignore_merges=True, adds_bos=True)
_O200K = Recipe((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"), _bytes))
_BAILING = Recipe(
    (
        _words(
            r"\p{N}",
            contraction="'(?i:[sdmt]|ll|ve|re)|",
            lead=r"[^\r\n\p{L}\p{N}]?+",
            symbols=r" ?[^\s\p{L}\p{N}]++[\r\n]*",
            lines=r"\s*[\r\n]",
        ),
        _bytes,
    )
)
_SEED_CODER = Recipe((_words(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+"), _bytes))
_MINICPM5 = Recipe((_split(r"\p{N}{1,3}"), _words(r"\p{N}+"), _bytes), ignore_merges=True)
_TINY_AYA = Recipe(
    (
        _split(r"\d{1,3}(?=(?:\d{3})*\b)"),
        _cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"),
        _bytes,
    )
)


def _named(*groups: tuple[Recipe, str]) -> Mapping[str, Recipe]:
    return {name: recipe for recipe, names in groups for name in names.split()}


#: Every name that is supported. "default" is what files without a name get.
RECIPES: Mapping[str, Recipe] = _named(
    (_GPT2, "gpt-2 phi-2 jais gigachat a.x-4.0 mellum exaone4 trillion granite-docling"),
    (replace(_GPT2, nfc=True), "mpt olmo gpt-neox"),
    (_DIGITS_GPT2, "smollm starcoder refact codeshell exaone minerva-7b mellum2"),
    (replace(_DIGITS_GPT2, nfc=True), "command-r"),
    (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_CL100K, "dbrx smaug-bpe chatglm-bpe"),
    (replace(_CL100K, ignore_merges=True), "glm4 glm5"),
    (replace(_QWEN2, nfc=True), "qwen2 deepseek-r1-qwen megrez"),
    (_QWEN2, "stablelm2 hunyuan solar-open grok-2"),
    (_QWEN35, "qwen35"),
    (_DEEPSEEK_LLM, "deepseek-llm"),
    (_DEEPSEEK_CODER, "deepseek-coder"),
    (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense joyai-llm"),
    (_FALCON, "falcon"),
    (Recipe((_BLOOM_CUT, _bytes)), "bloom poro-chat gpt3-finnish"),
    (Recipe((_BLOOM_CUT, _single_digits, _bytes)), "viking"),
    (_TEKKEN, "tekken"),
    (_O200K, "gpt-4o llama4 kanana2 minimax-m2"),
    (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
    (_SEED_CODER, "seed-coder"),
    (_MINICPM5, "minicpm5"),
    (_TINY_AYA, "tiny_aya cohere2moe"),
    (_DEFAULT, "default"),
)
