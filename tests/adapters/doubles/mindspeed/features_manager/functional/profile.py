from mindspeed.features_manager.feature import MindSpeedFeature


class ProfileFeature(MindSpeedFeature):
    def __init__(self):
        super().__init__("profile", 2)

    def register_args(self, parser):
        group = parser.add_argument_group(title=self.feature_name)
        group.add_argument("--profile-level", type=str, default="level0")
        group.add_argument("--profile-with-stack", action="store_true", default=False)
        group.add_argument("--profile-save-path", type=str, default="./profile_dir")
