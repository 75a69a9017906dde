"""Images of an audit: vectors of all, their nearest neighbours, and groups of copies."""
