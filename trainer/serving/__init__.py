"""The exported model behind a server on this machine."""
