"""The error of an emulated NPU that cannot be built or started."""


class EmulatorError(RuntimeError):
    """The emulated NPU cannot be built or started; the message says what to do."""
