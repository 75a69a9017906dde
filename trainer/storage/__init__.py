"""Files in folders and on Cloud Storage."""
