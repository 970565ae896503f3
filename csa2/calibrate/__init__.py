"""Calibration: what one model's text says about its keys, kept in a small folder next to the model.

`capture` runs the model, `statistics` and `sensitivity` condense what it saw, `scorer_run` trains scorers on it
(`merge_sample`, `relaxed_merging`, `scorer_training`), `artefact` stores it, `run` does all of it.
"""
