"""What scores of a limited number of questions can show: intervals and tests."""
