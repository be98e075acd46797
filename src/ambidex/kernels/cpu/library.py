"""The native library, or an error that says what to do."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

from ambidex.errors import InstallationError

_NAME = "ambidex.kernels.cpu._native"


def load() -> ModuleType:
    """The module ``_native``, out of the folder AMBIDEX_NATIVE_DIR where that is set.

    Raises :class:`InstallationError` where it is missing or cannot be loaded.
    """
    folder = os.environ.get("AMBIDEX_NATIVE_DIR")
    try:
        module = importlib.import_module(_NAME)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == _NAME:
            reason = "are not built for this Python"
        else:
            reason = f"cannot be loaded: {str(error).splitlines()[0]}"
        raise InstallationError(
            f"Ambidex's native kernels {reason}. Install Ambidex again (python -m pip install "
            "--force-reinstall --no-deps ambidex), or in its sources run scripts/build.sh."
        ) from error
    if folder and Path(str(module.__file__)).resolve().parent != Path(folder).resolve():
        raise InstallationError(
            f"AMBIDEX_NATIVE_DIR is {folder}, which has no _native for this Python. Build it "
            "there, or unset the variable."
        )
    return module
