"""Named errors. Each message says what is wrong, the value, what is allowed and how to fix it."""


class Csa2Error(Exception):
    """Base of every error raised on purpose by this project."""


class OptionError(Csa2Error, ValueError):
    """A user option (or a combination of options) that cannot be honoured."""


class UnsupportedModelError(Csa2Error, ValueError):
    """A model whose KV cache this project cannot compress."""


class PageFormatError(Csa2Error, ValueError):
    """A page format that does not exist or does not fit the geometry of the model."""


class ArenaFullError(Csa2Error, RuntimeError):
    """The arena has no room for the pages asked for, even after compaction."""


class IntegrityError(Csa2Error, RuntimeError):
    """An internal invariant is broken: accounting that does not add up, or a piece that is missing."""


class DemoModelError(Csa2Error, RuntimeError):
    """The demo model could not be fetched or converted."""


class CalibrationError(Csa2Error, ValueError):
    """A calibration that cannot be made, read, or used for this model."""


class DocumentError(Csa2Error, ValueError):
    """A document that cannot be pinned."""


class UnknownDocumentError(DocumentError):
    """No document of that id."""


class DocumentConflictError(DocumentError):
    """A document that does not go with what is there: another one of its id, or memory that requests need."""


class ProgramError(Csa2Error, ValueError):
    """A program of the SGLang language that uses a document in a way that cannot find it."""


class BackendError(Csa2Error, RuntimeError):
    """A backend of a program that serves no pinned documents, or does not answer."""
