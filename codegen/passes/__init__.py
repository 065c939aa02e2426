"""Graph to Graph: each pass takes a verified graph and returns one."""
