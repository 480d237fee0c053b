"""The code reward: programs as answers, judged by tests in a sandbox."""
