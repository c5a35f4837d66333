"""The operators, one folder each: __init__ (public function), op, reference, kernels, cases."""
