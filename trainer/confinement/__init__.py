"""Limits of a process that acts for a program, such as an agent, which may not do all that its user may."""

LIMITS_VARIABLE = "VLMPIPE_CONFINED"  # has them as JSON; without it nothing is limited
