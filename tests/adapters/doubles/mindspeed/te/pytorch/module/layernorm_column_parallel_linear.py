class TELayerNormColumnParallelLinear:
    def __init__(self, weight, config):
        self.layer_norm_weight, self.config = weight, config

    def _rmsnorm(self, inp):
        return inp
