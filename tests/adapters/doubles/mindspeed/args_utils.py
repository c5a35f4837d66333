"""The arguments of this process; `repatch` adds to them."""

import argparse

_ARGS = argparse.Namespace(optimization_level=2)


def get_full_args():
    return _ARGS
