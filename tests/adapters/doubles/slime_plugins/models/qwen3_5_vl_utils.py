import torch


def get_packed_cp_local_indices(cu_seqlens, cp_size, cp_rank, device):
    """Return the rank's two chunks of each sequence; also called on a single rank."""
    if any(length % (2 * cp_size) for length in torch.as_tensor(cu_seqlens).diff().tolist()):
        raise ValueError("must be divisible")
    return "chunks"
