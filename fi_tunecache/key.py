"""The key of an entry: which question of the autotuner it answers.

FlashInfer writes a key as ``str((custom_op, runner_class, nearest_profile, extras))``. dtypes
print bare (``torch.bfloat16``), so the text is not a Python literal; it is read here from its
syntax tree, never evaluated. (0.6.13 to 0.7.4: ``flashinfer/autotuner/autotuner.py``,
``ProfilingCacheKey.file_key``.)
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from functools import lru_cache
from sys import intern
from typing import Annotated, TypeAlias, Union

import msgspec
from msgspec import Struct

from .errors import FormatError
from .json_document import INT64

__all__ = [
    "MAX_KEY_BYTES",
    "MAX_NESTING",
    "Dtype",
    "Extra",
    "Key",
    "Profile",
    "is_legacy_key",
    "parse_extras",
    "parse_profile",
]

MAX_KEY_BYTES = 8 * 1024
MAX_NESTING = 16


class Dtype(Struct, frozen=True):
    """A torch dtype by name, without torch: ``Dtype("bfloat16")`` prints ``torch.bfloat16``."""

    name: str

    def __repr__(self) -> str:
        return f"torch.{self.name}"


Profile: TypeAlias = tuple[tuple[int, ...], ...]
"""One shape per input: a dynamic dimension is its bucket, a constrained one -1, a non-tensor ``(0,)``."""

Extra: TypeAlias = Union[bool, int, float, str, Dtype, tuple["Extra", ...], list["Extra"], None]
"""What ``get_cache_key_extras`` may hold: scalars, dtypes, and tuples or lists of them."""


# gc=False here and in what is made per entry: there are no cycles, and without it
# half of the time of a large resolution is spent looking for some.
class Key(Struct, frozen=True, gc=False):
    """The four fields that name an entry. ``str()`` and :meth:`parse` are inverse.

    ``text`` is the key as FlashInfer prints it; it is made from the other fields where it is
    not given. FlashInfer compares texts, so two keys are equal when their texts are.
    """

    custom_op: str
    runner: str
    profile: Profile
    extras: tuple[Extra, ...]
    text: str = ""

    def __post_init__(self) -> None:
        if not self.text:
            text = str((self.custom_op, self.runner, self.profile, self.extras))
            msgspec.structs.force_setattr(self, "text", text)

    @property
    def shape(self) -> tuple[str, Profile]:
        """The op and the profile: keys that share them differ in the runner, and are rivals in a lookup."""
        return self.custom_op, self.profile

    @classmethod
    def parse(cls, text: str) -> Key:
        """Read a key as FlashInfer writes it.

        Does not evaluate anything and does not accept another spelling of the same key
        (FlashInfer compares the text, so such an entry would never be hit).

        Parameters
        ----------
        text
            At most 8 KiB, nesting at most 16, integers of 64 bits, finite floats.

        Raises
        ------
        FormatError
            With the reason; for a 3-tuple of FlashInfer before 0.6.13, that it lacks extras.
        """
        match = _KEY.fullmatch(text) if len(text) <= MAX_KEY_BYTES else None
        if match is None:
            raise _malformed(text)
        custom_op, runner, profile, extras = match.groups()
        if not (custom_op + runner).isprintable():  # str() would have escaped it
            raise _malformed(text)
        # Interned: 100,000 keys hold a handful of names.
        return cls(intern(custom_op), intern(runner), parse_profile(profile), parse_extras(extras), text)

    def __str__(self) -> str:
        return self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.text == other.text


# Only text that str() of the parsed tuple gives back matches: names without quotes or
# backslashes, one space after a comma, a trailing comma in 1-tuples alone.
_INT = r"(?:0|-?[1-9]\d*)"
_SHAPE = rf"\((?:{_INT}(?:,|(?:, {_INT})+))?\)"
_PROFILE = rf"\((?:{_SHAPE}(?:,|(?:, {_SHAPE})+))?\)"
_KEY = re.compile(rf"\('([^'\\\n]+)', '([^'\\\n]+)', ({_PROFILE}), (\(.*\))\)", re.ASCII)
_LEGACY_KEY = re.compile(rf"\('[^'\\\n]+', '[^'\\\n]+', {_PROFILE}\)", re.ASCII)
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_profile_decoder = msgspec.json.Decoder(tuple[tuple[_Size, ...], ...])


def is_legacy_key(text: str) -> bool:
    """Whether a key lacks extras, as FlashInfer before 0.6.13 wrote it. Does not read a text that is too long."""
    return len(text) <= MAX_KEY_BYTES and _LEGACY_KEY.fullmatch(text) is not None


def _malformed(text: str) -> FormatError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    if len(text) > MAX_KEY_BYTES:
        return FormatError(f"a key of {len(text)} characters is longer than {MAX_KEY_BYTES}: {shown}")
    if is_legacy_key(text):
        return FormatError(
            f"key without extras, as FlashInfer before 0.6.13 wrote it: {shown}",
            "tune again with FlashInfer 0.7.1 or newer",
        )
    return FormatError(f"not a key as FlashInfer writes it: {shown}")


def parse_profile(text: str) -> Profile:
    """Read ``((1, 2048), (0,))``; raises FormatError for anything that is not a tuple of shapes of 64-bit integers."""
    try:
        return _profile_decoder.decode(text.replace(",)", ")").replace("(", "[").replace(")", "]"))
    except (msgspec.DecodeError, RecursionError):
        raise FormatError(f"not a profile as FlashInfer writes it: {text[:80]}") from None


@lru_cache(maxsize=4096)
def parse_extras(text: str) -> tuple[Extra, ...]:
    """Read ``(torch.bfloat16, True, 0)``; raises FormatError for anything else than a tuple of extras.

    Remembered by text: a bundle of thousands of entries holds a handful of different extras.
    """
    if _nesting(text) > MAX_NESTING:
        raise FormatError(f"extras are nested deeper than {MAX_NESTING}: {text[:80]}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the syntax of what is refused below
            extras = _literal(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"extras can't be read ({error}): {text[:80]}") from None
    if not isinstance(extras, tuple) or str(extras) != text:
        raise FormatError(f"not extras as FlashInfer writes them: {text[:80]}")
    return extras


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]":
            depth -= 1
    return deepest


def _literal(node: ast.expr) -> Extra:
    if isinstance(node, ast.Constant) and isinstance(node.value, (type(None), bool, int, float, str)):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = node.operand.value if isinstance(node.operand, ast.Constant) else None
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            raise ValueError("a minus sign before something else than a number")
        value = -number
    elif isinstance(node, ast.Tuple):
        return tuple(_literal(item) for item in node.elts)
    elif isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return Dtype(node.attr)
    else:
        raise ValueError(f"{type(node).__name__} is not allowed in extras")
    if type(value) is int and value not in INT64:
        raise ValueError("an integer of more than 64 bits")
    if type(value) is float and not math.isfinite(value):
        raise ValueError("a float that is not finite")
    return value
