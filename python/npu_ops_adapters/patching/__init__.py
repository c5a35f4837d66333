"""Replacing a framework's functions: a patch is data, which one engine applies, checks and undoes.

What a patch replaces is looked up in its module, compared with the signatures that are known, and
only then touched. Modules that imported the same object by value are given the replacement too.

    records    Patch, and where one stands: State, Status
    engine     plan, apply, verify, revert
    hand_over  patches that a framework's own patch manager places, again and again
    holders    which modules hold an object, and replacing it in all of them or in none
    signatures why what is there cannot be replaced

The states of a patch. `plan` and `apply` tell the upper ones, `verify` the lower:

    DISABLED <-- NPU_OPS_DISABLE names its op
    WAITING ---- its module is imported ---> READY --- apply ---> APPLIED --- revert --> REVERTED
                             |    |                                |   |
               unknown, or   |    |  a framework's   someone else  |   |  others imported the
               make fails    |    |  manager's task  replaced it   |   |  original before
                             v    v                                v   v
                 REFUSED, KEPT    LEFT --- adopt --> APPLIED  OVERWRITTEN, CAPTURED
"""

from npu_ops_adapters.patching.engine import adopt, apply, forget, plan, protect, revert, verify
from npu_ops_adapters.patching.hand_over import hand_over, place, renew, take_back
from npu_ops_adapters.patching.records import Names, Patch, State, Status, Statuses
from npu_ops_adapters.patching.signatures import parameters, wrapped

__all__ = [
    "Names",
    "Patch",
    "State",
    "Status",
    "Statuses",
    "adopt",
    "apply",
    "forget",
    "hand_over",
    "parameters",
    "place",
    "plan",
    "protect",
    "renew",
    "revert",
    "take_back",
    "verify",
    "wrapped",
]
