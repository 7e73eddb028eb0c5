"""What ranks did in their last steps: rings of records, one clock for all, and the pages drawn of them."""
