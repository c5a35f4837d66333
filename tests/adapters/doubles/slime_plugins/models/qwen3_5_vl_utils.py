import torch


def get_packed_cp_local_indices(cu_seqlens, cp_size, cp_rank, device):
    """Two chunks of each sequence, which both may be one rank's."""
    if any(length % (2 * cp_size) for length in torch.as_tensor(cu_seqlens).diff().tolist()):
        raise ValueError("must be divisible")
    return "chunks"
