"""The tuning results inside FlashInfer's own package: read, never imported or run.

``flashinfer/tuning_configs/v0_1_trtllm_fused_moe_<GPU>.py`` (up to 0.7.4) assigns one dict
literal to ``best_configs``. Its keys lack extras, so since FlashInfer 0.6.13 no lookup hits them.
"""

from __future__ import annotations

import ast
import warnings

from .entry import LegacyEntry, read_tactic
from .errors import FormatError
from .json_document import naming
from .key import is_legacy_key

__all__ = ["MAX_MODULE_BYTES", "read_bundled_module"]

MAX_MODULE_BYTES = 1024 * 1024
_NAME = "best_configs"


def read_bundled_module(data: bytes, *, source: str = "") -> tuple[LegacyEntry, ...]:
    """The entries of a bundled module, in its order. See :attr:`LegacyEntry.STATEMENT`.

    Parameters
    ----------
    data
        The module's source text, at most 1 MiB.
    source
        Named in the error.

    Raises
    ------
    FormatError
        Not Python, or ``best_configs`` is not one literal dict of keys to (position, tactic).
    """
    with naming(source):
        if len(data) > MAX_MODULE_BYTES:
            raise FormatError(f"{len(data)} bytes are more than {MAX_MODULE_BYTES}", "name a bundled module")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the syntax of a module that is only read
                module = ast.parse(data)
            found = [node.value for node in module.body if isinstance(node, ast.Assign) and _assigns(node)]
            configs = ast.literal_eval(found[-1]) if found else None
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise FormatError(f"not a module of literals ({error})", "name a bundled module") from None
        if not isinstance(configs, dict):
            raise FormatError(f"does not assign a dict to {_NAME}", "name a bundled module of FlashInfer")
        return tuple(_read_entry(text, value) for text, value in configs.items())


def _assigns(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == _NAME for target in node.targets)


def _read_entry(text: object, value: object) -> LegacyEntry:
    if not isinstance(text, str) or not is_legacy_key(text):
        raise FormatError(f"not a key of a bundled module: {str(text)[:80]}", "read newer formats as JSON")
    if not isinstance(value, tuple) or len(value) != 2 or type(value[0]) is not int:
        raise FormatError(f"the value is not a position and a tactic, at {text[:80]}", "name a bundled module")
    return LegacyEntry(text, value[0], read_tactic(value[1]))
