"""``ambidex pull``: fetch a model into the cache."""

from __future__ import annotations

from collections.abc import Sequence

from ambidex.cli.common import say, wants
from ambidex.errors import OptionError


def main(argv: Sequence[str]) -> int:
    from ambidex.weights import hub

    if wants(argv, "--help", "-h"):
        print(
            "usage: ambidex pull MODEL...\n\n"
            "MODEL is an alias or a hub id (org/name, or org/name:FILE for one GGUF file).\n"
            f"Aliases: {', '.join(hub.aliases())}.\n"
            "Hub files are kept in HF_HOME, others in AMBIDEX_CACHE."
        )
        return 0
    unknown = [word for word in argv if word.startswith("-")]
    if unknown:
        raise OptionError(f"ambidex pull has no option {unknown[0]}. See ambidex pull --help.")
    if not argv:
        raise OptionError(f"Name a model to fetch, for example: ambidex pull {hub.DEFAULT_MODEL}")
    for name in argv:
        print(hub.pull(name, say).path)
    return 0
