"""Print the reference page of the rules."""

from pipelines.planner.rules import markdown

print(markdown(), end="")
