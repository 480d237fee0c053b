"""Tools that a policy calls: the format of calls, the tools, and the loop of calling them until there is an answer."""
