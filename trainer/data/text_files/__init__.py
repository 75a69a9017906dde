"""Files of text that hold records: JSON values and CSV rows, read in bounded memory."""
