// Errors as values: one sentence about what went wrong, and the exit code of the program.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

namespace lowbit::ckpt {

enum class Exit { kFine = 0, kRuntime = 1, kUsage = 2, kBadInput = 3, kMismatch = 4 };

/// What a caller may act on; the text says more. Damaged: the bytes are not those that were
/// written, so that another copy, or an older checkpoint, may be whole.
enum class Cause { kOther, kDamaged, kTooLarge };

struct Error {
  Exit code;
  std::string text;
  // Where it happened, as far as known. The text says it too; these are for callers that show it in
  // another way.
  std::string file = {}, item = {}, tensor = {};
  Cause cause = Cause::kOther;

  /// The same error with a text before its own.
  Error after(const std::string& before) const {
    Error out = *this;
    out.text = before + text;
    return out;
  }
  /// The same error with the place added; what is known already stays.
  Error at(std::string tensor_name, std::string file_name = {}, std::string item_name = {}) const {
    Error out = *this;
    if (out.tensor.empty()) out.tensor = std::move(tensor_name);
    if (out.file.empty()) out.file = std::move(file_name);
    if (out.item.empty()) out.item = std::move(item_name);
    return out;
  }
};

/// Bad or unsafe input: exit code 3.
inline Error bad(std::string text) { return {Exit::kBadInput, std::move(text)}; }
/// The same, of bytes that are not those that were written.
inline Error damaged(std::string text) {
  return {Exit::kBadInput, std::move(text), {}, {}, {}, Cause::kDamaged};
}
/// The same, of more than a limit.
inline Error too_large(std::string text) {
  return {Exit::kBadInput, std::move(text), {}, {}, {}, Cause::kTooLarge};
}
/// Two things that must be equal are not: exit code 4.
inline Error mismatch(std::string text) { return {Exit::kMismatch, std::move(text)}; }
/// A request that cannot be followed: exit code 2.
inline Error usage(std::string text) { return {Exit::kUsage, std::move(text)}; }
/// I/O error (disk full, permission denied, interrupted): exit code 1.
inline Error failed(std::string text) { return {Exit::kRuntime, std::move(text)}; }
/// What the system says of its last error, for the text of such an Error.
inline std::string reason() { return std::strerror(errno); }

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::move(value)) {}
  Result(Error error) : content_(std::move(error)) {}
  bool ok() const { return content_.index() == 0; }
  T& value() { return std::get<0>(content_); }
  const T& value() const { return std::get<0>(content_); }
  const Error& error() const { return std::get<1>(content_); }

 private:
  std::variant<T, Error> content_;
};

struct Nothing {};
using Status = Result<Nothing>;
inline Status fine() { return Nothing{}; }

#define LB_JOIN2(a, b) a##b
#define LB_JOIN(a, b) LB_JOIN2(a, b)
/// `ASSIGN_OR_RETURN(name, expression)` declares `name` as the result's value, or returns its
/// error.
#define ASSIGN_OR_RETURN(name, ...) ASSIGN_OR_RETURN_(LB_JOIN(result_, __LINE__), name, __VA_ARGS__)
#define ASSIGN_OR_RETURN_(result, name, ...) \
  auto result = (__VA_ARGS__);               \
  if (!result.ok()) return result.error();   \
  auto name = std::move(result.value())
/// `RETURN_IF_ERROR(expression)`: returns the error of a Status.
#define RETURN_IF_ERROR(...) \
  if (auto status_ = (__VA_ARGS__); !status_.ok()) return status_.error()

}  // namespace lowbit::ckpt
