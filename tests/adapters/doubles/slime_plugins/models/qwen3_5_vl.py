from .qwen3_5_vl_utils import get_packed_cp_local_indices


class Qwen3_5VLModel:
    def __init__(
        self, config, language_layer_spec, hf_config, args, *, pre_process, post_process, vp_stage
    ):
        self.rope = getattr(config, "position_embedding_type", "mrope")
        self.tokens = get_packed_cp_local_indices
