"""The runtime: sleep mode copies weights by it."""


def memcpy(*arguments):
    raise NotImplementedError("acl.rt.memcpy: this is a double of CANN's package")
