"""The names that bitsandbytes, torchao and torchastic use."""
