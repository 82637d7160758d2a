"""Programs for people: quick start, checks, model fetching."""
