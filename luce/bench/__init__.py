"""`luce bench` runs what is here: problems, modes in turn, checked answers, one table."""
