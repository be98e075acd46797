"""The CPU's native kernels; ``library.load()`` gives the module that is built from C++."""

import os

# Another build of `_native` goes before the installed one: scripts/sanitize.sh runs tests with it.
if folder := os.environ.get("AMBIDEX_NATIVE_DIR"):
    __path__.insert(0, folder)
