"""A fuzzer of every public function, with its own formulas for the expected results.

    ops/      each public function: its settings, how arguments are made from them, which arguments
              have a gradient, are written or used as indices; and its formula in fp64, written
              without npu_ops. A new op is a new file.
    target    the class that such a file fills in for a function, and helpers that draw arguments
    formula   helpers of the formulas
    targets   the functions of all files
    memory    memory layouts of tensors: strided, expanded, surrounded by NaN, sharing storage
    files     preference files (written by `npu-ops tune`), valid and invalid
    ways      ways to call, such as eagerly, compiled, under a dispatch mode, with a preference
              file, transformed, with other default dtypes and devices
    judge     one case: the call, the comparison with the formula, and a check of memory around it
    child     a process that judges cases, so that a crash is a verdict too
    run       hypothesis draws cases and shrinks those that fail

A case is a dict of plain values, so one line of JSON repeats it: `npu-ops fuzz --repeat CASE`.

A call must return the formula's results, within a tolerance from the formula's own sensitivity to
rounding. If the formula refuses the arguments, the call must raise a ValueError, TypeError or
NotImplementedError that names one of them. A crash, a NaN instead of the formula's number, or an
error of torch's own is a finding.
"""
