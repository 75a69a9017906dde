"""What runs inside of a step: its context, its logic, notifications."""
