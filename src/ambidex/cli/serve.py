"""``ambidex serve``: the HTTP server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ambidex.cli.common import print_help, resolve, wants


def main(argv: Sequence[str]) -> int:
    if wants(argv, "--help", "-h", "--help-all"):
        print_help("serve", "MODEL [OPTIONS]", (), argv)
        return 0
    resolved = resolve("serve", argv)
    if resolved is None:
        return 0
    engine, server = resolved.engine_config(), resolved.server_config()
    # Ready means that the largest steps have run, and that the memory is there.
    engine = replace(engine, warm_up_fully=True, cache=replace(engine.cache, prefault=True))

    from ambidex.server.launch import serve

    return serve(engine, server, resolved.notes)
