import dataclasses
import types

import torch  # noqa: F401  (as SGLang does)


class requests:  # noqa: N801  (the package, as far as it is asked for)
    class exceptions:  # noqa: N801
        class HTTPError(Exception):
            pass


class ServerArgs:
    """Not a dataclass, but a record type of SGLang's own."""

    __records__ = ("tp_size", "port")


class SGLangEngine:
    def __init__(self, begins=200):
        # begins: the HTTP status of the server's answer to begin_weight_update
        self.begins, self.asked = begins, []

    def _make_request(self, endpoint, payload=None):
        if endpoint == "begin_weight_update" and self.begins != 200:
            error = requests.exceptions.HTTPError(endpoint)
            error.response = types.SimpleNamespace(status_code=self.begins)
            raise error
        self.asked.append(endpoint)

    def pause_generation(self):
        self.asked.append("pause")

    def continue_generation(self):
        self.asked.append("continue")

    def update_weights_from_disk(self, model_path, load_format=None, weight_version=None):
        self._make_request("disk")

    def update_weights_from_tensor(
        self, serialized_named_tensors, load_format=None, flush_cache=False, weight_version=None
    ):
        self._make_request("tensor")

    def update_weights_from_distributed(
        self, names, dtypes, shapes, group_name, flush_cache=False, weight_version=None,
        load_format=None,
    ):  # fmt: skip
        self._make_request("distributed")


def names_of_arguments():
    return [field.name for field in dataclasses.fields(ServerArgs)]
