"""Rope: always replaced, whatever the arguments say."""

from mindspeed.features_manager.feature import MindSpeedFeature

ROPE = "megatron.core.models.common.embeddings.rope_utils"


class FusedRoPEFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("use-fused-rotary-pos-emb", 0)

    def register_args(self, parser):
        parser.add_argument("--use-fused-rotary-pos-emb", action="store_true")

    def validate_args(self, args):
        if args.use_fused_rotary_pos_emb and args.position_embedding_type != "rope":
            raise AssertionError("--use-fused-rotary-pos-emb must enable with rope")

    def register_patches(self, patch_manager, args):
        from mindspeed.core.fusions import fused_rope

        register = patch_manager.register_patch
        register(f"{ROPE}.apply_rotary_pos_emb", fused_rope.apply_rotary_pos_emb)
        register(f"{ROPE}._apply_rotary_pos_emb_bshd", fused_rope.apply_rotary_pos_emb_bshd)
