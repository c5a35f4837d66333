"""In the place of torch.compile and torch.jit.script."""


def dummy_compile(*args, **kwargs):
    def wrapper(*fn_args, **fn_kwargs):  # with no signature, and no name, of what it passes on to
        return args[0](*fn_args, **fn_kwargs)

    return wrapper if args else dummy_compile
