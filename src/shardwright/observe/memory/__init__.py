"""What is alive on a rank, by what it is for: counted, reported, and explained where memory runs out."""
