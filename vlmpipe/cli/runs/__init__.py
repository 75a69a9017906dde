"""Commands about runs: of one, of several, and of all in a folder."""
