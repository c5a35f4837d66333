"""The default features."""

from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from mindspeed.features_manager.fusions.fused_rope import FusedRoPEFeature


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
    features = [FusedRoPEFeature(), FlashAttentionFeature(), GenerateMaskFeature()]
    return [*features, ResetAttentionMaskFeature()]


def set_default_features_list():
    if hasattr(MindSpeedFeaturesManager, "add_feature"):
        for feature in create_features_list():
            MindSpeedFeaturesManager.add_feature(feature)
    else:
        MindSpeedFeaturesManager.set_features_list(create_features_list())


set_default_features_list()
