"""Libraries of others that are shown a policy's words, asked so that the words are never run outside the sandbox."""
