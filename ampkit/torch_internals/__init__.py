"""The names that torch does not promise: every module that takes one takes it from here."""
