"""Run verl's own GRPO trainer on Ray: python verl_grpo.py OVERRIDES...

OVERRIDES are of verl's configuration. verl's metrics per step go to VERL_FILE_LOGGER_PATH.
verl_worker.py writes the workers' records; its docstring says where.
"""

from __future__ import annotations

import sys
import warnings

from hydra import compose, initialize_config_module
from verl.trainer import main_ppo
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device


def main(overrides: list[str]) -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    auto_set_device(config)
    validate_config(config, use_reference_policy=True, use_critic=False)
    main_ppo.run_ppo(config, main_ppo.TaskRunnerV1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
