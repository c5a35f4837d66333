"""This process's arguments, to which `repatch` adds."""

import argparse

_ARGS = argparse.Namespace(optimization_level=2)


def get_full_args():
    return _ARGS
