"""Named errors of the operators. Each message says what is wrong, the value, what is allowed and how to go on."""


class KernelError(RuntimeError):
    """Base of the errors that have to do with compiled kernels."""


class KernelBuildError(KernelError):
    """The kernels could not be compiled."""


class InstructionSetError(KernelError):
    """An instruction set that does not exist, or that this machine lacks."""


class PageLayoutError(ValueError):
    """A layout that asks for something that pages cannot hold."""


class KernelLayoutError(KernelError):
    """A page layout that the compiled kernels cannot read."""


class PlanError(KernelError):
    """A batch that cannot be planned."""
