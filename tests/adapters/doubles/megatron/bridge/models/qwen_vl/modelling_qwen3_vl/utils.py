def split_deepstack_embs(masks, embeds, tp_size=1, tp_rank=0, cp_size=1, cp_rank=0):
    """Return this rank's part of each embedding."""
    return masks, [embed.chunk(tp_size)[tp_rank] for embed in embeds]
