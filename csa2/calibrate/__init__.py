"""Calibration: what one model's text says about its keys, kept in a small folder next to the model.

`capture` runs the model, `statistics` condenses what it saw, `artefact` stores it, `run` does all three.
"""
