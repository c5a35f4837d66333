"""Replaces functions of a framework: a patch is data; one engine applies, checks and reverts it.

The engine finds a patch's target in its module, and replaces it only if its signature is one of the
known ones. Modules that imported the object by value (`from module import name`) also get the
replacement.

    records    Patch, State and Status
    engine     plan, apply, verify, revert
    hand_over  patches that a framework's own patch manager applies, possibly many times
    holders    finds the modules that hold an object, and replaces it in all of them or in none
    signatures reasons why a target cannot be replaced

The states of a patch. `plan` and `apply` return the upper ones, `verify` the lower:

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
