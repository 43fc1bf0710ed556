"""Checkpoints of every public form: checked before a byte is loaded, read in pieces, converted, exported."""
