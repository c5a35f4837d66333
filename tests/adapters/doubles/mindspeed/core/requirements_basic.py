"""The function that replaces torch.compile and torch.jit.script."""


def dummy_compile(*args, **kwargs):
    def wrapper(*fn_args, **fn_kwargs):  # forwards, without the function's signature and name
        return args[0](*fn_args, **fn_kwargs)

    return wrapper if args else dummy_compile
