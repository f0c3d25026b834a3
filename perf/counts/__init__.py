"""What a step calls, launches, waits for and moves, exactly and without a GPU."""
