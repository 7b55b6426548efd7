"""What `luce bench` runs: problems, modes in turn, checked answers, one table."""
