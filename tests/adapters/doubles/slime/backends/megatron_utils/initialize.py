steps = []


def init(args):
    steps.append("init")
