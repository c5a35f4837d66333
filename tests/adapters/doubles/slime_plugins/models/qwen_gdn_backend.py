def get_chunk_gated_delta_rule(backend):
    if backend == "fla":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule
    return backend
