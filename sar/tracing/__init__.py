"""Edge programs: lazy edge tensors, what is recorded of them, and the program that runs."""
