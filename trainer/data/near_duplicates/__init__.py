"""Near-duplicate images: signatures of their pixels, and the search for validation images that training has seen."""
