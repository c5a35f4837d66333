"""Mutants that behave like the kernel for every call, and why.

Keys: (file of csrc, rule of mutations.py, the changed text).
"""

UNUSED = "a buffer is made that nobody uses"
AGAIN = "what is there already is made again"
ONE_BY_ONE = "rows that lie together are copied or converted one by one"
BISHENG = "the scalar pipe stores before it issues to the vector pipe; bisheng puts a flag there"

EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("bias_dropout_add/bias_dropout_add_ascendc.cpp", "a condition forgotten",
     "tiling.bias_kind != kNoBias"): UNUSED,
    ("bias_dropout_add/bias_dropout_add_ascendc.cpp", "no event",
     "Wait<HardEvent::S_V>();"): BISHENG,
    ("rope/angles_ascendc.h", "a condition forgotten", "!whole_halves_"): UNUSED,
    ("rope/angles_ascendc.h", "a condition never met", "prepared_ == index"): AGAIN,
    ("l2norm/l2norm_ascendc.cpp", "a condition forgotten", "!whole"): AGAIN,
    ("rms_norm_gated/rms_norm_gated_ascendc.cpp", "a condition forgotten", "!whole"): AGAIN,
    ("common/ascendc.h", "a condition never met", "tile.columns == stride"): ONE_BY_ONE,
    ("common/rows_ascendc.h", "a condition never met",
     "tile.columns == tiling_.stride"): ONE_BY_ONE,
    ("common/rows_ascendc.h", "an offset forgotten", "row * row_bytes(tensor)"):
        "in `store`: what is written has rows at one distance, so it is one copy from the first",
    ("rope/angles_ascendc.h", "no event", "Wait<AscendC::HardEvent::S_V>();"): BISHENG,
    ("gdn_gate/gdn_gate_ascendc.cpp", "an element less", "count"):
        "of the series' last term alone, in one element of a tile: 1.4e-7 of it at the most",
    ("causal_conv1d_update/causal_conv1d_update_ascendc.cpp", "a condition forgotten",
     "piece / tiling_.sequences != block"): AGAIN,
    ("causal_conv1d_update/causal_conv1d_update_ascendc.cpp", "a condition forgotten", "whole"):
        "a Gather that repeats 0 times does nothing",
    ("causal_conv1d_update/causal_conv1d_update_ascendc.cpp", "an element less", "8"):
        "from one repeat to the next, of an instruction that has one",
    ("causal_conv1d_update/causal_conv1d_update_ascendc.cpp", "no event",
     "Wait<HardEvent::S_V>();"): BISHENG,
    ("gated_delta_rule_update/gated_delta_rule_update_ascendc.cpp", "a condition forgotten",
     "!tiling.v_first"): UNUSED,
    ("gated_delta_rule_update/gated_delta_rule_update_ascendc.cpp", "a condition never met",
     "!tiling_.slot_per_token"):
        "the one slot gets the state after each token, the last of which is right",
}  # fmt: skip
