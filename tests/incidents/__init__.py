"""Incidents that an on-call engineer meets, made by real faults, and what `vlmpipe diagnose` says of them."""
