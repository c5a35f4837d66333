class Qwen3VLModelProvider:
    _pg_collection = None

    def provide(self, pre_process=None, post_process=None, vp_stage=None):
        return self._pg_collection, pre_process


class Qwen3VLMoEModelProvider(Qwen3VLModelProvider):
    def provide(self, pre_process=None, post_process=None, vp_stage=None):
        return self._pg_collection, pre_process
