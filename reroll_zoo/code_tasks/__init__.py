"""Small programming tasks, drawn by seed: a prompt, a solution, and tests in the function form of reward kind `code`."""
