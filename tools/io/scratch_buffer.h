// Working memory that is borrowed for the length of a call.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

namespace lowbit::ckpt {

/// Lends vectors the memory of the thread until the end of the scope. Their content is left from an
/// earlier use. Thousands of sources exist at once: buffers of their own would make memory grow
/// with the checkpoint.
template <class... Vectors>
class ScratchBuffer {
 public:
  explicit ScratchBuffer(Vectors&... of) : of_(of...) { (take(of), ...); }
  ~ScratchBuffer() {
    std::apply([](auto&... of) { (give(of), ...); }, of_);
  }
  ScratchBuffer(const ScratchBuffer&) = delete;
  ScratchBuffer& operator=(const ScratchBuffer&) = delete;

 private:
  template <class T>
  static std::vector<std::vector<T>>& kept() {
    thread_local std::vector<std::vector<T>> of_thread;
    return of_thread;
  }
  template <class T>
  static void take(std::vector<T>& v) {
    if (kept<T>().empty()) return;
    v = std::move(kept<T>().back());
    kept<T>().pop_back();
  }
  template <class T>
  static void give(std::vector<T>& v) {
    kept<T>().push_back(std::move(v));
    v.clear();
  }
  std::tuple<Vectors&...> of_;
};

}  // namespace lowbit::ckpt
