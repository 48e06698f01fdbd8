"""What the layers of other libraries see of this one, and every patch of such a library."""
