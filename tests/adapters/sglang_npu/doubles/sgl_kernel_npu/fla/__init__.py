"""Part of the stand-in for sgl-kernel-npu."""
