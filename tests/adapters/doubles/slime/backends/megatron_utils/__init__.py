"""Chooses the accelerator when imported; the real module then imports Megatron-LM."""

import sys

import torch  # noqa: F401  (before all else)

from slime.utils import accelerator

chosen = accelerator.initialize_accelerator()
mindspeed_was_first = "mindspeed.megatron_adaptor" in sys.modules
