"""What model families want: one processor each."""
