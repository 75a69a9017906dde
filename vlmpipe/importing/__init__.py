"""Files of guides and of other training programs, translated into run files and corrected job specs."""
