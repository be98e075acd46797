"""The CPU's native kernels; ``library.load()`` gives the module that is built from C++."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class _OtherBuild:
    """Finds ``_native`` in the folder AMBIDEX_NATIVE_DIR, before the installed one.

    scripts/sanitize.sh runs tests with a build of its own. It goes before all other finders, since
    an editable installation brings one that knows where the installed library is.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        folder = os.environ.get("AMBIDEX_NATIVE_DIR")
        if not folder or name != f"{__name__}._native":
            return None
        return PathFinder.find_spec(name, [folder])


if "AMBIDEX_NATIVE_DIR" in os.environ:
    sys.meta_path.insert(0, _OtherBuild)
