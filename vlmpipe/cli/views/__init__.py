"""Tables and charts that commands print."""
