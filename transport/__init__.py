"""Transport moves messages (links, channels) and pages (page transports) and knows no policy."""
