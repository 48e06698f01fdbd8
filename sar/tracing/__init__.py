"""Edge programs: lazy edge tensors, what is recorded of them, and the program that runs.

Torch functions on a :class:`sar.tracing.lazy.EdgeTensor` are recorded as nodes, by
:mod:`sar.tracing.recording`. When rows are wanted, :mod:`sar.tracing.patterns` looks for attention
and :mod:`sar.tracing.weights` for a softmax in which messages are linear; all else is a
:class:`sar.tracing.program.Program`, run block by block. No library's graph is known here.
"""
