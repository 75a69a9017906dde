"""Validation questions: which are asked, with which images, of the run's model and of the champion."""
