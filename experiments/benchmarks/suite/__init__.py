"""The programs of the suite: one file each, exporting `PROGRAM = Program(...)`; `_*.py` are helpers.

To add one, write a file here whose `build(seed, scale)` returns `(target, args)`; it is found by listing the folder.
"""
