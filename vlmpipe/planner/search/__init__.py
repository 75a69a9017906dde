"""`plan --suggest`: compare machines and strategies."""
