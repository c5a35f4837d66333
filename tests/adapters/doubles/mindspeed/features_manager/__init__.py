"""MindSpeed's default list of features."""

from mindspeed import BRANCH
from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from mindspeed.features_manager.fusions.fused_rope import FusedRoPEFeature


class RequirementsBasicFeature(MindSpeedFeature):
    """Replaces torch.compile and torch.jit.script; from core_r0.18 on MegatronAdaptor does.

    core_r0.16 also replaces two functions of fla.
    """

    def __init__(self):
        super().__init__("requirements-basic", 0)

    def pre_register_patches(self, patch_manager, args):
        from mindspeed.core.requirements_basic import dummy_compile
        from mindspeed.core.ssm.gdn_backend import chunk_gated_delta_rule, l2norm

        register = patch_manager.register_patch
        if BRANCH != "core_r0.18":
            register("torch.compile", dummy_compile)
            register("torch.jit.script", dummy_compile)
        if BRANCH == "core_r0.16":
            rule = "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
            register(rule, chunk_gated_delta_rule, create_dummy=True)
            register("fla.modules.l2norm.l2norm", l2norm, create_dummy=True)


class FlashAttentionFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("use-flash-attn")

    def register_args(self, parser):
        parser.add_argument("--pre-tockens", type=int, default=65536)
        parser.add_argument("--next-tockens", type=int, default=0)
        parser.add_argument("--sparse-mode", type=int, default=0)

    def register_patches(self, patch_manager, args):
        from mindspeed.core.attention import forward

        target = "megatron.core.transformer.dot_product_attention.DotProductAttention.forward"
        patch_manager.register_patch(target, forward)


class GenerateMaskFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("generate-mask", 0)

    def register_patches(self, patch_manager, args):
        from mindspeed.core.attention import mask_wrapper

        target = "megatron.core.transformer.dot_product_attention.DotProductAttention.forward"
        patch_manager.register_patch(target, mask_wrapper)


class ResetAttentionMaskFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("reset-attention-mask")

    def register_patches(self, patch_manager, args):
        from mindspeed.core.fusions.fused_rope import apply_rotary_pos_emb_thd

        target = "megatron.core.models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd"
        patch_manager.register_patch(target, apply_rotary_pos_emb_thd)


def create_features_list():
    features = [RequirementsBasicFeature(), FusedRoPEFeature(), FlashAttentionFeature()]
    return [*features, GenerateMaskFeature(), ResetAttentionMaskFeature()]


def set_default_features_list():
    if hasattr(MindSpeedFeaturesManager, "add_feature"):
        for feature in create_features_list():
            MindSpeedFeaturesManager.add_feature(feature)
    else:
        MindSpeedFeaturesManager.set_features_list(create_features_list())


set_default_features_list()
