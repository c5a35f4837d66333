"""A fuzzer of every public function, with formulas of its own.

    targets   what is called: for each function its settings, arguments made from them, and which of
              these it differentiates, writes or follows as indices
    formulas  what is right: the operators' mathematics in fp64, written without npu_ops
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
