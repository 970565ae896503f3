"""Sealing and opening pages. `reference` (torch) is the specification."""
