"""`sar bench`: memory, speed, bandwidth and traffic of this machine in tables and plots."""
