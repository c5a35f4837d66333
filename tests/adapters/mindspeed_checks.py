"""Run checks with MindSpeed or its stand-in in a process of their own.

python -c "import mindspeed_checks; mindspeed_checks.run('ours first')"

with a megatron-core release and `mindspeed` on PYTHONPATH. Prints a line of JSON for each check:
its name, and null or the error. The argument is the order of imports: `ours first` (npu-ops, then
MindSpeed), `megatron first` (npu-ops, Megatron, MindSpeed) or `late` (MindSpeed, then npu-ops).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types

from outcomes import error_of

ROPE = "megatron.core.models.common.embeddings.rope_utils"
BDA = "megatron.core.fusions.fused_bias_dropout"
ATTENTION = "megatron.core.transformer"
FORWARD = f"{ATTENTION}.dot_product_attention:DotProductAttention.forward"
ORDERS = ("ours first", "megatron first", "late")
COVERED = {
    (f"{ROPE}:_apply_rotary_pos_emb_bshd", "rope"),
    (f"{ROPE}:_apply_rotary_pos_emb_bshd", "mrope"),
    (f"{ROPE}:_apply_rotary_pos_emb_thd", "rope"),
    (f"{ROPE}:apply_rotary_pos_emb", "rope"),
    (f"{BDA}:bias_dropout_add_fused_train", "bias_dropout_add"),
    (f"{BDA}:bias_dropout_add_fused_inference", "bias_dropout_add"),
    (f"{BDA}:bias_dropout_add_unfused", "bias_dropout_add"),
    (f"{ATTENTION}.attention:Attention.__init__", "attention"),
    (f"{ATTENTION}.multi_latent_attention:MultiLatentAttention.__init__", "attention"),
    (FORWARD, "attention"),
}
ALONE = COVERED - {
    (f"{ROPE}:apply_rotary_pos_emb", "rope"),
    (FORWARD, "attention"),
}  # the targets that Megatron's adapter replaces without MindSpeed
CHECKS: list = []
OF_THE_DOUBLE: list = []  # checks that need the stand-in's counts of calls


def check(function):
    CHECKS.append(function)
    return function


def check_double(function):
    OF_THE_DOUBLE.append(function)
    return check(function)


# Helpers that read the state of the patches


def registry():
    return sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager


def manager():
    return sys.modules["mindspeed.features_manager.features_manager"].MindSpeedFeaturesManager


def value(target: str):
    module, _, path = target.partition(":")
    found = sys.modules[module]
    for name in path.split("."):
        found = getattr(found, name)
    return found


def layers(target: str) -> list:
    """Return the function at `target` and all that it wraps, outermost first."""
    found = [value(target)]
    while hasattr(found[-1], "__wrapped__"):
        found.append(found[-1].__wrapped__)
    return found


def theirs(target: str):
    """Return the function that MindSpeed itself sets at `target`, or None."""
    patch = registry().patches_info.get(target.replace(":", "."))
    return patch and patch.patch_func


def states() -> dict:
    import npu_ops_adapters

    return {(row.target, row.op): row.sentence for row in npu_ops_adapters.verify()}


def in_force() -> None:
    """Check that each op is replaced once, outermost, over MindSpeed's or Megatron's function."""
    found = states()
    lost = {key: state for key, state in found.items() if state != "applied"}
    assert lost == {}, lost
    for key in COVERED:
        assert found.get(key) == "applied", (key, found.get(key))
    for target, _ in COVERED:
        ours = [op for covered, op in COVERED if covered == target]
        functions = layers(target)
        names = [f.__name__.startswith("npu_ops_") for f in functions]
        assert names[: len(ours)] == [True] * len(ours), (target, functions)
        assert not any(names[len(ours) :]), (target, functions)
        if theirs(target):
            assert theirs(target) in functions[len(ours) :], (target, functions)
        else:
            assert functions[len(ours)].__module__.startswith("megatron."), (target, functions)
    features = manager().FEATURES_LIST
    names = [type(feature).__name__ for feature in features]
    assert names[-1] == "NpuOpsFeature" and names.count("NpuOpsFeature") == 1, names


def snapshot() -> dict:
    """Return the contents of both frameworks' modules, of the patch registry and feature list."""
    found = {"features": list(manager().FEATURES_LIST)}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("megatron", "mindspeed", "megatron_adaptor"):
            for key, held in list(vars(module).items()):
                found[name, key] = held
                if isinstance(held, type) and held.__module__ == name:
                    found |= {(name, key, k): v for k, v in list(vars(held).items())}
    for name, patch in registry().patches_info.items():
        found["patch", name] = [patch.patch_func, patch.final_patch_func, *patch.wrappers]
    return found


def changed(before: dict, after: dict) -> list:
    def same(a, b):
        if isinstance(a, list) and isinstance(b, list):
            return len(a) == len(b) and all(map(same, a, b))
        return a is b or same_wrapper(a, b)

    def same_wrapper(a, b):
        """Return whether both wrap the same function alike; MindSpeed makes new
        wrappers each time."""
        made = isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType)
        if not (made and a.__code__ is b.__code__ and hasattr(a, "__wrapped__")):
            return False
        return a.__wrapped__ is b.__wrapped__

    ignored = {"FEATURES_LIST", "patches_info", "__doc__", "_abc_impl"}
    keys = [key for key in before | after if key[-1] not in ignored]
    return [key for key in keys if not same(before.get(key, keys), after.get(key, keys))]


def is_ours(held) -> bool:
    if isinstance(held, list):
        return any(map(is_ours, held))
    homes = (getattr(held, "__module__", None), type(held).__module__)
    return any(isinstance(home, str) and home.startswith("npu_ops") for home in homes)


def calls_of(function, *args, **kwargs):
    """Return a call's result, and how often it called npu-ops's rope."""
    import npu_ops

    count, ours = [], npu_ops.apply_rotary_pos_emb_freqs
    npu_ops.apply_rotary_pos_emb_freqs = lambda *a, **k: count.append(1) or ours(*a, **k)
    try:
        return function(*args, **kwargs), len(count)
    finally:
        npu_ops.apply_rotary_pos_emb_freqs = ours


def config(**changes):
    settings = {"apply_rope_fusion": False, "rotary_interleaved": False, "mrope_section": None}
    return types.SimpleNamespace(**(settings | {"multi_latent_attention": False} | changes))


def heads(*shape):
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def angles(*shape):
    import torch

    half = heads(*shape[:-1], shape[-1] // 2) * 9
    return torch.cat((half, half), -1)


class Group:
    def size(self):
        return 1

    def rank(self):
        return 0


# The checks, in the order they run


@check
def every_layer_is_in_force():
    in_force()


@check
def plain_and_multimodal_rope_are_ours_and_the_rest_is_mindspeeds():
    t = heads(6, 2, 3, 16)
    leaf = value(f"{ROPE}:_apply_rotary_pos_emb_bshd")
    dispatch = value(f"{ROPE}:apply_rotary_pos_emb")
    for batch in (1, 2):
        freqs = angles(6, batch, 1, 16)
        out, calls = calls_of(leaf, t, freqs)
        assert calls == 1
        expected = theirs(f"{ROPE}:_apply_rotary_pos_emb_bshd")(t, freqs)
        assert (out - expected).abs().max() < 1e-5
        through, calls = calls_of(dispatch, t, freqs, config())
        assert calls == 1 and through.equal(out)
    freqs = angles(6, 2, 3, 16)  # angles for each head
    out, calls = calls_of(leaf, t, freqs)
    assert calls == 0 and out.equal(theirs(f"{ROPE}:_apply_rotary_pos_emb_bshd")(t, freqs))


@check
def the_scale_of_yarn_is_mindspeeds():
    """MindSpeed's function reads the scale from the global arguments, not from its parameter."""
    t, freqs = heads(6, 2, 3, 16), angles(6, 1, 1, 16)
    leaf = value(f"{ROPE}:_apply_rotary_pos_emb_bshd")
    args = sys.modules["mindspeed.args_utils"].get_full_args()
    settings = {"rope_scaling_type": "yarn", "yarn_scaling_factor": 4.0, "rope_scaling_mscale": 2.0}
    settings |= {"rope_scaling_mscale_all_dim": 1.0, "yarn_scale": 2.0}
    plain, before = leaf(t, freqs), dict(vars(args))
    vars(args).update(settings)
    try:
        out, calls = calls_of(leaf, t, freqs, mscale=3.0)
        assert calls == 0 and out.equal(theirs(f"{ROPE}:_apply_rotary_pos_emb_bshd")(t, freqs))
        assert (out - plain).abs().max() > 0.1
    finally:
        vars(args).clear()
        vars(args).update(before)
    assert leaf(t, freqs).equal(plain)


@check
def arguments_of_later_megatrons_pass():
    """MindSpeed's functions lack `inverse`, `mla_rotary_interleaved` and `max_seqlen`."""
    t, freqs = heads(6, 2, 3, 16), angles(6, 1, 1, 16)
    dispatch = value(f"{ROPE}:apply_rotary_pos_emb")
    plain = dispatch(t, freqs, config())
    same = {"inverse": False, "mla_rotary_interleaved": False, "max_seqlen": None}
    assert dispatch(t, freqs, config(), cp_group=Group(), **same).equal(plain)
    assert dispatch(t, freqs, config(multi_latent_attention=True), **same).equal(plain)
    back = dispatch(plain, freqs, config(), inverse=True)
    assert (back - t).abs().max() < 1e-5
    mla = dispatch(t, freqs, config(), mla_rotary_interleaved=True)
    assert mla.equal(dispatch(t, freqs, config(multi_latent_attention=True)))


@check
def packed_rope_has_its_group():
    """One version of MindSpeed's dispatcher drops cp_group; Megatron's function then raises."""
    import torch

    lengths = torch.tensor([0, 4, 10], dtype=torch.int32)
    t, freqs = heads(10, 3, 16), angles(6, 1, 1, 16)
    dispatch = value(f"{ROPE}:apply_rotary_pos_emb")
    out, calls = calls_of(dispatch, t, freqs, config(), lengths, cp_group=Group(), max_seqlen=6)
    assert calls == 1
    leaf = value(f"{ROPE}:_apply_rotary_pos_emb_bshd")
    parts = [leaf(part[:, None], freqs[: len(part)])[:, 0] for part in (t[:4], t[4:])]
    assert (out - torch.cat(parts)).abs().max() < 1e-6


@check
def fused_rope_is_allowed_for_mrope():
    feature = next(f for f in manager().FEATURES_LIST if type(f).__name__ == "FusedRoPEFeature")
    for position, wanted, fails in (
        ("mrope", True, False),
        ("rope", True, False),
        ("learned_absolute", True, True),
        ("learned_absolute", False, False),
    ):
        args = argparse.Namespace(use_fused_rotary_pos_emb=wanted, position_embedding_type=position)
        try:
            feature.validate_args(args)
        except AssertionError:
            assert fails
        else:
            assert not fails, position
        assert args.position_embedding_type == position
    feature.validate_args(argparse.Namespace())


@check
def repatched_with_a_dict_it_is_there_again():
    for _ in range(2):
        args = {"context_parallel_size": 1, "use_flash_attn": True}  # as in verl
        sys.modules["mindspeed.megatron_adaptor"].repatch(args)
        in_force()


@check
def repatched_with_a_namespace_it_is_there_again():
    for _ in range(2):
        args = argparse.Namespace(context_parallel_size=1, use_fused_rotary_pos_emb=False)
        sys.modules["mindspeed.megatron_adaptor"].repatch(args)
        in_force()
    assert sys.modules["mindspeed.args_utils"].get_full_args().context_parallel_size == 1


@check_double
def attention_is_ours_over_mindspeeds():
    """npu-ops computes the attention of DotProductAttention.

    MindSpeed computes it for configurations with is_llava or qk_clip.
    """
    import torch

    import npu_ops

    calls, forward = sys.modules["mindspeed"].CALLS, value(FORWARD)
    layer = types.SimpleNamespace(
        config=types.SimpleNamespace(pre_tockens=65536, sparse_mode=0, sequence_parallel=False),
        attn_mask_type=types.SimpleNamespace(name="causal"),
        attention_dropout=torch.nn.Dropout(0.1),
        scale_mask_softmax=types.SimpleNamespace(scale=None),
        softmax_scale=0.3,
        training=False,
        layer_number=1,
    )
    q, k, v = heads(6, 2, 4, 8), heads(6, 2, 2, 8), heads(6, 2, 2, 8)
    calls.clear()
    out = forward(layer, q, k, v, None)
    expected = npu_ops.attention(q, k, v, layout="SBND", is_causal=True, scale=0.3).flatten(2)
    assert out.equal(expected) and calls == []
    for setting in ("is_llava", "qk_clip"):
        setattr(layer.config, setting, True)
        calls.clear()
        forward(layer, q, k, v, None)
        assert calls == ["mask", "attention"], calls
        delattr(layer.config, setting)


@check_double
def lengths_that_are_no_tensor_reach_mindspeeds_function():
    import torch

    sys.modules["mindspeed.megatron_adaptor"].repatch({"reset_attention_mask": True})
    in_force()
    calls, dispatch = sys.modules["mindspeed"].CALLS, value(f"{ROPE}:apply_rotary_pos_emb")
    lengths = types.SimpleNamespace(position_ids=torch.tensor([0, 1, 2, 0, 1, 2]))
    t, freqs = heads(6, 1, 3, 16), angles(3, 1, 1, 16)
    calls.clear()
    out = dispatch(t, freqs, config(), lengths, cp_group=Group())  # "thd" has no cp_group
    assert "thd" in calls, calls
    leaf = value(f"{ROPE}:_apply_rotary_pos_emb_bshd")
    assert (out[3:] - leaf(t[3:], freqs)).abs().max() < 1e-6
    sys.modules["mindspeed.megatron_adaptor"].repatch({"reset_attention_mask": False})


@check_double
def gated_delta_net_is_ours_over_mindspeeds():
    import torch
    from mindspeed.core.ssm import gated_delta_net, gdn_backend

    calls, operators = sys.modules["mindspeed"].CALLS, gdn_backend.load_gdn_operators()
    x = heads(1, 5, 16)
    for names in (operators, gated_delta_net):
        calls.clear()
        assert (names.l2norm(x).norm(dim=-1) - 1).abs().max() < 1e-3
        y, _ = names.causal_conv1d(
            x=x, weight=heads(16, 4), bias=None, activation="silu", initial_state=None,
            output_final_state=False, cu_seqlens=None,
        )  # fmt: skip
        q, v = heads(1, 5, 2, 16), heads(1, 5, 2, 16)
        gate = heads(1, 5, 2)
        settings = {"g": -gate.abs(), "beta": gate.sigmoid(), "cu_seqlens": None}
        o, state = names.chunk_gated_delta_rule(q, q, v, **settings)
        assert calls == [] and state is None and not o.equal(v) and not y.equal(x)
        assert names.chunk_gated_delta_rule(q, q, v, **settings, head_first=True)[0] is v
        assert calls == ["chunk_gated_delta_rule"], calls
    for name in ("chunk_gated_delta_rule", "l2norm"):
        held = vars(gated_delta_net)
        assert is_ours(held[name]) and is_ours(held[f"_ms_{name}"]), name
        assert not is_ours(getattr(gdn_backend, name)), name  # MindSpeed sets fla's names to these
    layer = gated_delta_net.GatedDeltaNet()
    g, beta = layer._compute_g_and_beta(torch.zeros(2), torch.zeros(2), gate, gate)
    assert (g + torch.nn.functional.softplus(gate)).abs().max() < 1e-6
    assert (beta - gate.sigmoid()).abs().max() < 1e-6 and calls == ["chunk_gated_delta_rule"]
    from mindspeed.core.fusions.fused_rms_norm import RMSNorm

    layer.act_fn = torch.nn.functional.silu
    for zero_centered in (False, True):
        norm_config = types.SimpleNamespace(layernorm_zero_centered_gamma=zero_centered)
        layer.out_norm = RMSNorm(16, config=norm_config)
        calls.clear()
        y = layer._apply_gated_norm(x[0], x[0])
        assert calls == [], calls
        expected = torch.nn.functional.rms_norm(x[0], (16,), eps=1e-6) * (1 + zero_centered)
        expected = expected * torch.nn.functional.silu(x[0])
        assert (y - expected).abs().max() < 1e-5


@check_double
def one_and_a_weight_are_not_rounded():
    import torch
    from mindspeed.core.fusions.fused_rms_norm import RMSNorm
    from mindspeed.te.pytorch.module import layernorm_column_parallel_linear as projection

    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(16).bfloat16() / 8
    for zero_centered in (False, True):
        settings = {"layernorm_zero_centered_gamma": zero_centered, "layernorm_epsilon": 1e-6}
        config = types.SimpleNamespace(**settings)
        norm = RMSNorm(16, config=config).bfloat16()
        norm.weight.data.copy_(weight)
        expected = torch.nn.functional.rms_norm(x.double(), (16,), eps=1e-6)
        expected = expected * (zero_centered + weight.double())
        assert norm(x).equal(expected.bfloat16()), zero_centered
        part = projection.TELayerNormColumnParallelLinear(weight, config)._rmsnorm(x)
        assert part is x if not zero_centered else part.equal(expected.bfloat16())


@check_double
def mindspeed_bridges_layer_is_ours():
    import torch
    from mindspeed_bridge.models.qwen_vl.modelling_qwen3_vl import gated_delta_net, rope

    calls = sys.modules["mindspeed"].CALLS
    calls.clear()
    q, v, gate = heads(1, 5, 2, 16), heads(1, 5, 2, 16), heads(1, 5, 2)
    given = {"g": -gate.abs(), "beta": gate.sigmoid(), "output_final_state": False}
    settings = given | {"use_qk_l2norm_in_kernel": True, "cu_seqlens": None}
    of_kernels, _ = gated_delta_net.chunk_gated_delta_rule(q, q, v, **settings)
    in_torch, _ = gated_delta_net.torch_chunk_gated_delta_rule(q, q, v, **given)
    assert of_kernels.equal(in_torch) and not in_torch.equal(v)
    assert is_ours(gated_delta_net.causal_conv1d) and is_ours(gated_delta_net.l2norm)
    layer = gated_delta_net.GatedDeltaNet()
    g, _ = layer._compute_g_and_beta(torch.zeros(2), torch.zeros(2), gate, gate)
    assert not g.equal(gate) and is_ours(type(layer)._apply_gated_norm)
    settings = config(apply_rotary_pos_emb_in_fp32=True)
    t, freqs = heads(5, 1, 2, 16), angles(5, 1, 1, 16)
    found, counted = calls_of(rope.apply_rotary_pos_emb_absolute, t, freqs, settings)
    assert counted == 1 and not found.equal(t) and calls == [], calls
    rule = gated_delta_net.torch_chunk_gated_delta_rule(q, q, v, given["g"], given["beta"], 48)
    assert rule[0] is v and calls == ["torch_chunk_gated_delta_rule"], calls


@check
def arguments_that_are_missing_have_their_defaults():
    full = sys.modules["mindspeed.args_utils"].get_full_args()
    del full.use_fused_rotary_pos_emb
    sys.modules["mindspeed.megatron_adaptor"].repatch({})
    assert full.use_fused_rotary_pos_emb is False
    from npu_ops_adapters.mindspeed import arguments

    args = arguments.complete({"use_fused_rotary_pos_emb": True}, manager().FEATURES_LIST)
    assert args.use_fused_rotary_pos_emb is True and args.sparse_mode == 0


def feature_base() -> type:
    return sys.modules["mindspeed.features_manager.feature"].MindSpeedFeature


@check
def a_list_set_anew_has_it():
    """MindSpeed-LLM and -MM set their own list; a feature that they append precedes ours."""

    class Later(feature_base()):
        def register_patches(self, patch_manager, args):
            pass

    features = [f for f in manager().FEATURES_LIST if type(f).__name__ != "NpuOpsFeature"]
    manager().set_features_list(list(features))
    sys.modules["mindspeed.megatron_adaptor"].repatch({})
    in_force()
    later = Later("later", 0)
    manager().FEATURES_LIST.append(later)
    sys.modules["mindspeed.megatron_adaptor"].repatch({})
    in_force()
    manager().FEATURES_LIST.remove(later)


@check
def what_others_register_comes_under_it():
    def another(x_with_bias, residual, prob):
        seen.append(residual.shape)
        return x_with_bias[0] + residual

    seen = []
    name = "bias_dropout_add_fused_train"
    registry().register_patch(f"{BDA}.{name}", another)
    registry().apply_patches()
    in_force()
    x = heads(2, 8)
    seen.clear()
    value(f"{BDA}:{name}")((x, None), x[:1], 0.0)  # a shape that npu-ops declines
    assert seen == [(1, 8)], seen
    sys.modules["mindspeed.megatron_adaptor"].repatch({})
    in_force()


@check
def with_patches_removed_megatrons_adapter_is_in_force():
    manager().remove_patches()
    found = states()
    for key in ALONE:
        assert found.get(key) == "applied", (key, found.get(key))
    for target, _ in ALONE:
        functions = layers(target)
        assert functions[0].__name__.startswith("npu_ops_"), functions
        assert functions[-1].__module__.startswith("megatron."), functions
    dispatch = value(f"{ROPE}:apply_rotary_pos_emb")
    assert dispatch.__module__ == ROPE
    sys.modules["mindspeed.megatron_adaptor"].repatch({})
    in_force()


@check
def an_op_that_is_disabled_is_left_to_mindspeed():
    from npu_ops.core import env

    with env.override(disable=frozenset({"rope"})):
        sys.modules["mindspeed.megatron_adaptor"].repatch({})
        dispatch = f"{ROPE}:apply_rotary_pos_emb"
        assert value(dispatch) is theirs(dispatch)
        names = [f.__name__ for f in layers(f"{ROPE}:_apply_rotary_pos_emb_bshd")]
        # The patch of the op mrope is not disabled; its wrapper is also called npu_ops_rope.
        assert len(names) == 2 and names[0] == "npu_ops_rope", names
    sys.modules["mindspeed.megatron_adaptor"].repatch({})
    in_force()


@check
def an_error_of_ours_is_none_of_mindspeeds():
    """The error is logged, and Megatron keeps MindSpeed's functions."""
    import npu_ops_adapters
    from npu_ops_adapters.mindspeed import features

    covered = features.covered
    features.covered = lambda: 1 / 0
    try:
        sys.modules["mindspeed.megatron_adaptor"].repatch({})
        found = value(f"{ROPE}:apply_rotary_pos_emb")
        assert found is theirs(f"{ROPE}:apply_rotary_pos_emb")
    finally:
        features.covered = covered
    sys.modules["mindspeed.megatron_adaptor"].repatch({})
    in_force()
    assert npu_ops_adapters.verify()


@check
def reverted_nothing_of_ours_is_left():
    import npu_ops_adapters

    rows = npu_ops_adapters.revert()
    assert {row.sentence for row in rows} == {"reverted"}, rows
    left = [key for key, held in snapshot().items() if is_ours(held)]
    assert left == [], left
    for target, _ in COVERED:
        assert not theirs(target) or theirs(target) in layers(target), target
        assert value(target).__module__.startswith(("mindspeed.", "megatron.")), target


@check
def applied_again_over_patches_that_are_in():
    apply_revert_and_apply()
    sys.modules["mindspeed.megatron_adaptor"].repatch({})
    in_force()


def apply_revert_and_apply() -> None:
    import npu_ops_adapters

    before = snapshot()
    npu_ops_adapters.apply()
    in_force()
    npu_ops_adapters.revert()
    differ = changed(before, snapshot())
    assert differ == [], differ[:9]
    npu_ops_adapters.apply()


def prepare(order: str) -> None:
    if order == "megatron first":
        import_megatron()
    importlib.import_module("mindspeed.megatron_adaptor")
    if order == "late":
        import_megatron()
        apply_revert_and_apply()


def import_megatron() -> None:
    for target, _ in COVERED:
        importlib.import_module(target.partition(":")[0])


def run(order: str) -> None:
    import torch

    torch.set_num_threads(1)
    prepare(order)
    for function in CHECKS:
        print(json.dumps([function.__name__, error_of(function)]), flush=True)
