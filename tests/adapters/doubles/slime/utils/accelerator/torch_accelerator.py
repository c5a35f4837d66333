class TorchAccelerator:
    visible_devices_env = "CUDA_VISIBLE_DEVICES"

    def _module(self):
        raise NotImplementedError

    def device_count(self):
        return self._module().device_count()
