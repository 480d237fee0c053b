"""What a run will need and how long a step will take, told from configs alone: before a process starts or a GPU is taken."""
