"""The only room with names that torch does not promise, each with what it is needed for."""
