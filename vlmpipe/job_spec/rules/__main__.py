"""Print the reference page of the rules."""

from vlmpipe.job_spec.rules import markdown

print(markdown(), end="")
