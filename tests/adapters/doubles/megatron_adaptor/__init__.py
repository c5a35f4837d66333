"""A double of MegatronAdaptor, which MindSpeed core_r0.18 builds upon."""
