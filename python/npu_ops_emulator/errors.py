"""What goes wrong before a process runs on the emulated NPU."""


class EmulatorError(RuntimeError):
    """The emulated NPU cannot be built or started; the message says what to do."""
