"""Writers of partitions: where everything goes, and one module for each format."""
