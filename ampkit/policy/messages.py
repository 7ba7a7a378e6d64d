"""How messages show a value: in one line, whatever its type, length or depth."""

import reprlib

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
short = _repr.repr
