"""An explanation shown: as JSON, on a terminal, and as one HTML file that opens anywhere."""
