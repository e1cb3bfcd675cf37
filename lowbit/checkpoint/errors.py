"""What is wrong with a checkpoint. Public as lowbit.checkpoint.CheckpointError."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """What is wrong with a checkpoint, or with writing one.

    Attributes:
        text: one sentence, which names the place too.
        code: the exit code of `lowbit-ckpt`: 1 an I/O error, 2 usage, 3 bad or unsafe input, 4 two
            things differ that must not.
        file, item, tensor: where, as far as it is known; "" otherwise. A name from a file has what
            a terminal could obey escaped.
        cause: "damaged" where bytes are not those that were written (a digest or checksum is wrong,
            a file is cut off), so that another copy, or an older checkpoint, may be whole; "too
            large" where a limit was met; "" otherwise.
    """

    def __init__(
        self,
        text: str,
        code: int = 1,
        file: str = "",
        item: str = "",
        tensor: str = "",
        cause: str = "",
    ) -> None:
        super().__init__(text, code, file, item, tensor, cause)  # all, so that it can be pickled
        self.text, self.code, self.file, self.item, self.tensor = text, code, file, item, tensor
        self.cause = cause

    def __str__(self) -> str:
        return self.text
