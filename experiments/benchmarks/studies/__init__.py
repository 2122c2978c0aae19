"""The studies: one file each, exporting `STUDY = Study(...)`; its name is a word on the command line."""
