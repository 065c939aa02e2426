"""Training of the small demonstration model that ships in assets/tiny."""
