"""How messages show what they were given: whatever it is, however long or deep, in one line."""

import reprlib

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
short = _repr.repr
