"""A stand-in for MegatronAdaptor, on which MindSpeed core_r0.18 is built."""
