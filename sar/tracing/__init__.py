"""Edge programs: lazy edge tensors, what is recorded of them, and the program that runs.

Torch functions on an :class:`sar.tracing.lazy.EdgeTensor` are recorded as nodes (``recording``).
When rows are wanted, ``patterns`` looks for attention and ``weights`` for a softmax in which
messages are linear; all else is a :class:`sar.tracing.program.Program`, run block by block.
"""
