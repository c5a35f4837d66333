"""The model: `loss_mask` it does not have."""


class Qwen3VLModel:
    def forward(self, input_ids, labels=None):
        return input_ids
