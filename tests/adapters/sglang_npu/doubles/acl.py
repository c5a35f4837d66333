"""A double of pyACL, which comes with CANN: it returns the architecture of the NPU."""

import types

rt = types.SimpleNamespace(get_device_info=lambda device, attribute: (2201, 0))
