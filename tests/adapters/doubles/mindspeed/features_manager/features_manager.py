"""The list of features; from core_r0.18 on a subclass of MegatronAdaptor's, with methods."""

from mindspeed import BRANCH
from mindspeed.patch_utils import MindSpeedPatchesManager

if BRANCH == "core_r0.18":
    from megatron_adaptor.features_manager.features_manager import FeaturesManager
else:

    class FeaturesManager:
        FEATURES_LIST = []

        @classmethod
        def set_features_list(cls, features_list):
            cls.FEATURES_LIST[:] = features_list


class MindSpeedFeaturesManager(FeaturesManager):
    @classmethod
    def apply_features_pre_patches(cls, mindspeed_args):
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(mindspeed_args):
                feature.pre_register_patches(MindSpeedPatchesManager, mindspeed_args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def apply_features_patches(cls, mindspeed_args):
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(mindspeed_args):
                feature.register_patches(MindSpeedPatchesManager, mindspeed_args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def remove_patches(cls):
        MindSpeedPatchesManager.remove_patches()
