"""Methods of cutting: who owns which node."""
