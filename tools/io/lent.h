// Working memory for the length of a call.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

namespace lowbit::ckpt {

/// Lends vectors the thread's memory until the end of the scope; what is in them is left from
/// before. Thousands of sources wait at once for their turn: what each kept for itself would grow
/// with the checkpoint.
template <class... Vectors>
class Lent {
 public:
  explicit Lent(Vectors&... of) : of_(of...) { (take(of), ...); }
  ~Lent() {
    std::apply([](auto&... of) { (give(of), ...); }, of_);
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

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
