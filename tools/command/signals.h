// Ctrl-C and kill: commands stop at the next piece and remove what they began.
#pragma once

namespace lowbit::ckpt {

/// SIGINT, SIGTERM and SIGHUP only set a flag from here on (one that was ignored stays ignored),
/// and a file beyond its limit is an error of `write` instead of the end of the program.
void watch_signals();
/// Whether one of them came.
bool stop_requested();

}  // namespace lowbit::ckpt
