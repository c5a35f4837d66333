"""A rollout for verl with transformers' generate on the CPU. verl's own need vLLM or SGLang.

Selected by `model.external_lib` and `rollout.name=transformers`. One server, a Ray process with the
whole model, receives the actor's weights as vLLM's server would. It records the answers it samples,
or replays recorded ones, so that every trainer learns from the same tokens. Log-probabilities
always come from its current weights.

rollout.engine_kwargs.transformers: {"record": the file, "replays": whether to read it}.
"""

from __future__ import annotations

import collections
import hashlib
import json
import pathlib

import ray
import torch
import transformers
from verl.workers.rollout import base, replica

NAME = "transformers"


def register(weights: str) -> None:
    """Register the rollout. weights: import path of the workers' class, Weights or a subclass."""
    base._ROLLOUT_REGISTRY[NAME, "async"] = weights
    replica.RolloutReplicaRegistry.register(NAME, lambda: Replica)


class Weights(base.BaseRollout):
    """Runs in each worker: sends the actor's weights to the server, from rank 0."""

    async def resume(self, tags):
        """Do nothing: nothing is ever released."""

    async def release(self):
        """Do nothing: there is nothing to release."""

    async def update_weights(self, weights, global_steps=None, **kwargs):
        # gathering needs all ranks
        state = {name: tensor.detach().cpu() for name, tensor in weights}
        if torch.distributed.get_rank() == 0:
            await ray.get_actor(NAME).load.remote(state, global_steps)


class Replica(replica.RolloutReplica):
    """One server for all workers."""

    async def launch_servers(self):
        options = self.config.engine_kwargs[NAME]
        self._server_handle = (
            ray.remote(Server)
            .options(name=NAME)
            .remote(
                self.model_config.path,
                self.config.response_length,
                pathlib.Path(options["record"]),
                options["replays"],
            )
        )
        self.servers, self._server_address = [self._server_handle], NAME


class Server:
    """The model, and the answers sampled from it."""

    def __init__(self, path: str, length: int, record: pathlib.Path, replays: bool):
        torch.set_num_threads(1)
        config = transformers.AutoConfig.from_pretrained(path)
        classes = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
        self.model = classes[hasattr(config, "vision_config")].from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.tokens = transformers.AutoTokenizer.from_pretrained(path)
        self.images = None
        if hasattr(config, "vision_config"):
            self.images = transformers.AutoProcessor.from_pretrained(path).image_processor
        self.record, self.replays, self.length, self.step = record, replays, length, 0
        self.sampled = json.loads(record.read_text()) if replays else {}
        self.asked = collections.Counter()

    async def load(self, state: dict[str, torch.Tensor], step: int) -> None:
        self.model.load_state_dict(state)
        self.step = step

    async def generate(
        self, request_id, *, prompt_ids, sampling_params, image_data=None, **kwargs
    ) -> replica.TokenOutput:
        """Return answer n for the n-th request with this prompt in this step.

        The order of requests with different prompts does not matter.
        """
        pictures = self.pictures(image_data)
        asked = self.step, tuple(prompt_ids), *(x.numpy().tobytes() for x in pictures.values())
        key = hashlib.sha256(repr((*asked, self.asked[asked])).encode()).hexdigest()[:16]
        self.asked[asked] += 1
        prompt = torch.tensor([prompt_ids])
        if not self.replays:
            torch.manual_seed(int(key[:8], 16))
            self.sampled[key] = self.sample(prompt, pictures, sampling_params["temperature"])
        answer = self.sampled[key]
        return replica.TokenOutput(
            token_ids=answer,
            log_probs=self.score(prompt, answer, pictures),
            stop_reason="completed",
            extra_fields={"global_steps": self.step},
        )

    def pictures(self, images) -> dict[str, torch.Tensor]:
        return dict(self.images(images, return_tensors="pt")) if images else {}

    def sample(self, prompt, pictures, temperature: float) -> list[int]:
        """Sample without special tokens except the end: a picture token would need a picture."""
        end = self.tokens.eos_token_id
        others = set(range(len(self.tokens), self.model.config.get_text_config().vocab_size))
        others |= set(self.tokens.all_special_ids) | set(self.tokens.added_tokens_decoder)
        out = self.model.generate(
            prompt, **pictures, **self.kinds(prompt), do_sample=True, temperature=temperature,
            top_k=0, top_p=1.0, max_new_tokens=self.length, eos_token_id=end,
            pad_token_id=self.tokens.pad_token_id, suppress_tokens=sorted(others - {end}),
        )  # fmt: skip
        return out[0, prompt.shape[1] :].tolist()

    @torch.no_grad()
    def score(self, prompt, answer, pictures) -> list[float]:
        """Return the log-probabilities of the answer's tokens, from one forward."""
        whole = torch.cat((prompt, torch.tensor([answer])), dim=1)
        logits = self.model(whole, **pictures, **self.kinds(whole)).logits[0]
        logits = logits[prompt.shape[1] - 1 : -1].log_softmax(-1)
        return logits.gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()

    def kinds(self, tokens) -> dict[str, torch.Tensor]:
        """Return which tokens are a picture's, in the processor's form."""
        if self.images is None:
            return {}
        return {"mm_token_type_ids": (tokens == self.model.config.image_token_id).int()}

    async def sleep(self):
        """Save the answers: at this point they are complete."""
        if not self.replays:
            self.record.write_text(json.dumps(self.sampled))

    async def wake_up(self):
        """Do nothing: the server never sleeps."""
