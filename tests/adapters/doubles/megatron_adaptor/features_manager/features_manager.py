"""The list of features that MegatronAdaptor shares."""


class FeaturesManager:
    FEATURES_LIST = []

    @classmethod
    def add_feature(cls, feature):
        if feature not in cls.FEATURES_LIST:
            cls.FEATURES_LIST.append(feature)

    @classmethod
    def set_features_list(cls, features_list):
        cls.FEATURES_LIST[:] = features_list

    @classmethod
    def apply_features_patches(cls, args):
        raise AssertionError("MindSpeed has methods of its own")
