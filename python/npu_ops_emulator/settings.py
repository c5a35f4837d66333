"""Settings of the emulated NPU, and the environment variables that carry them."""

from __future__ import annotations

import dataclasses
import os

# Name prefix of a chip -> AI cores, each with one cube and two vector cores.
CORES = {"Ascend910B3": 20, "Ascend910B4": 20, "Ascend910B": 24, "Ascend910_": 24, "Ascend950": 32}


@dataclasses.dataclass(frozen=True)
class Settings:
    """One emulated machine.

    devices: NPUs, 1 to 64.
    soc: the chip's name, e.g. Ascend910B3, Ascend910_9391, Ascend950PR_9579.
    memory_gib: memory of each device; more raises torch.OutOfMemoryError.
    check_bounds: report Triton kernels that read or write outside a tensor.
    trace: print every operator and collective that reaches the emulated runtime.
    """

    devices: int = 2
    soc: str = "Ascend910B3"
    memory_gib: float = 64.0
    check_bounds: bool = False
    trace: bool = False

    def __post_init__(self):
        if not 1 <= self.devices <= 64:
            raise ValueError(f"devices: got {self.devices}, needs 1 to 64")
        if not self.soc.startswith(tuple(CORES)):
            raise ValueError(
                f"soc: got {self.soc!r}, needs a name that begins with "
                f"{', '.join(sorted(CORES))}, e.g. Ascend910B3"
            )
        if self.memory_gib <= 0:
            raise ValueError(f"memory_gib: got {self.memory_gib}, needs more than 0")

    @property
    def cores(self) -> int:
        """Number of AI cores of the chip."""
        return next(cores for prefix, cores in CORES.items() if self.soc.startswith(prefix))

    def environment(self) -> dict[str, str]:
        """Return the variables that carry these settings; csrc/emulator/runtime.cpp reads them."""
        return {
            "NPU_OPS_EMULATOR_DEVICES": str(self.devices),
            "NPU_OPS_EMULATOR_SOC": self.soc,
            "NPU_OPS_EMULATOR_MEMORY_GIB": str(self.memory_gib),
            "NPU_OPS_EMULATOR_CHECK_BOUNDS": str(int(self.check_bounds)),
            "NPU_OPS_EMULATOR_TRACE": str(int(self.trace)),
            "NPU_OPS_EMULATOR_CUBE_CORES": str(self.cores),
        }

    @classmethod
    def current(cls, environ=os.environ) -> Settings:
        """Return the settings of this process."""
        prefix = "NPU_OPS_EMULATOR_"
        default = cls()
        return cls(
            devices=int(environ.get(f"{prefix}DEVICES", default.devices)),
            soc=environ.get(f"{prefix}SOC", default.soc),
            memory_gib=float(environ.get(f"{prefix}MEMORY_GIB", default.memory_gib)),
            check_bounds=environ.get(f"{prefix}CHECK_BOUNDS", "0") == "1",
            trace=environ.get(f"{prefix}TRACE", "0") == "1",
        )
