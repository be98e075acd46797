"""A server with the fake engine. Argument: a JSON object; ``server`` holds fields of ServerConfig,
``model`` of ModelConfig, ``log`` of LogConfig, ``engine`` the fake engine's own settings."""

from __future__ import annotations

import json
import sys

from fake_frontend import fake_frontend

from ambidex.config import EngineConfig, LogConfig, ModelConfig, ServerConfig
from ambidex.errors import AmbidexError
from ambidex.server.launch import serve


def main() -> int:
    settings = json.loads(sys.argv[1])
    model = {"served_model_names": ("fake",), **settings.get("model", {})}
    engine_config = EngineConfig(
        model=ModelConfig(model="fake-model", hf_overrides=settings.get("engine", {}), **model),
        log=LogConfig(**settings.get("log", {})),
    )
    server_config = ServerConfig(**{"port": 0, **settings.get("server", {})})
    try:
        return serve(
            engine_config,
            server_config,
            settings.get("notes", ()),
            engine_factory="fake_engine:FakeEngine",
            frontend_factory=fake_frontend,
        )
    except AmbidexError as error:
        print(f"ambidex: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
