"""Downloads images that records name by addresses of the web (data.fetch) into a store that preparation reads."""
