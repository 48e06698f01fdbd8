"""What makes a part of a graph look like other libraries' graphs to their layers."""
