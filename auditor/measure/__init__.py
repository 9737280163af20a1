"""Pure measurements on arrays: numpy and numba, no files, no torch."""
