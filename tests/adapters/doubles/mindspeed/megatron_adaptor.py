"""Applies all patches when it is imported."""

from mindspeed import BRANCH
from mindspeed.args_utils import get_full_args
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager


def repatch(args):
    MindSpeedFeaturesManager.remove_patches()
    items = args.items() if BRANCH != "core_r0.18" else vars(args).items()  # for slime's Namespace
    for name, value in items:
        setattr(get_full_args(), name, value)
    MindSpeedFeaturesManager.apply_features_pre_patches(get_full_args())
    MindSpeedFeaturesManager.apply_features_patches(get_full_args())


def patch_features():
    MindSpeedFeaturesManager.apply_features_pre_patches(get_full_args())
    MindSpeedFeaturesManager.apply_features_patches(get_full_args())


patch_features()
