"""`vlmpipe rehearse`: a strict Vertex AI and Cloud Storage on this machine, to submit runs to."""
