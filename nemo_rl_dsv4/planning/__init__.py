"""What a recipe needs of any number of GPUs, worked out in one process without one."""
