"""Code that runs inside steps: context, logic, notifications."""
