"""A fuzzer of every public function, with formulas of its own.

    ops/      each public function: its settings, arguments made from them, which of these it
              differentiates, writes or follows as indices; and what is right, a formula in fp64
              that is written without npu_ops. A new op is a new file.
    target    what such a file says of a function, and what makes arguments
    formula   what the formulas share
    targets   the functions of all files
    memory    where tensors lie: strided, expanded, in the middle of NaN, together
    ways      how it is called: eagerly, compiled, watched, transformed, under other defaults
    judge     one case: called, compared with the formula, memory around it looked at
    child     a process that judges, so that a crash is a verdict too
    run       hypothesis draws cases and makes those that fail small

A case is a dict of plain values, so one line of JSON repeats it: `npu-ops fuzz --repeat CASE`.

The outcome of a call must be what the formula says, as near as its own sensitivity to rounding
allows; or, where the formula refuses, a ValueError, TypeError or NotImplementedError that names an
argument. It is never a crash, NaN where the formula has numbers, or an error of torch's.
"""
