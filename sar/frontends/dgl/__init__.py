"""What DGL's layers see."""
