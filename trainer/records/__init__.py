"""Records of a run: what one step writes and others read, each a frozen type that alone reads and writes its file."""
