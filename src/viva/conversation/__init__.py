"""Who speaks when, who sees what, and how a reply is read."""
