"""Errors of the check."""

from csa2.errors import Csa2Error


class CheckError(Csa2Error, ValueError):
    """A check that cannot be made as asked."""


class EngineError(Csa2Error, RuntimeError):
    """An engine that ended or did not answer while it was measured."""
