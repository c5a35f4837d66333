"""The runtime, by which sleep mode copies weights."""


def memcpy(*arguments):
    raise NotImplementedError("acl.rt.memcpy: this is a double of CANN's package")
