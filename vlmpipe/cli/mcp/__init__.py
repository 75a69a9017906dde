"""`vlmpipe mcp`: the commands as tools for agents (Model Context Protocol), within a root and a cap."""
