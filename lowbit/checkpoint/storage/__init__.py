"""Storage for torch.distributed.checkpoint: Writer and Reader, what ranks tell each other, and the
folder that appears whole or not at all.
"""
