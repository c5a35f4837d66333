"""Two CANN operators that the emulated NPU lacks, in torch: they write new rows to caches."""

import torch_npu


def npu_scatter_nd_update_(self, indices, updates):
    self[indices.view(-1).long()] = updates
    return self


def _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    slots = slot_indices.long()
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[slots] = rows.view(-1, *cache.shape[2:])


torch_npu.npu_scatter_nd_update_ = npu_scatter_nd_update_
torch_npu._npu_reshape_and_cache = _npu_reshape_and_cache
