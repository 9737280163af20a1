"""``python -m auditor`` is ``auditor``."""

from auditor.cli import main

main()
